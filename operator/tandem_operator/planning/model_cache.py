"""Plans of ModelCaches: what to write, and the status. Pure, as `planning.plan`.

    whole commit of this source? ─ yes ─▶ Ready; commits that no workers use for `UNUSED_S` are removed by a Job
                                  │ no
                                  ▼
    no Job ─▶ make one     Job failed ─▶ Failed, and another one after `RETRY_S`, or once the spec is another
    Job done ─▶ its result is in the status, and the Job goes

A commit that was Ready before stays the one that services use until the next one is whole. The status is the memory of
which commits are on the volume: a Job that finds one there ends at once, so that a lost status costs no download.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated

import msgspec

from tandem_operator.api.model_cache import CachedCommit, CacheState, ModelCacheSpec, ModelCacheStatus
from tandem_operator.api.types import Condition, condition
from tandem_operator.builders.containers import Manifest, parse_quantity, resource_problems
from tandem_operator.builders.model_cache import (
    KEEP,
    REQUEST,
    SPEC,
    claim_name_of,
    download_job,
    download_policy,
    folder_of,
    halted,
    new_claim,
    prune_job,
    request_of,
)
from tandem_operator.planning.observed import Ref
from tandem_operator.planning.plan import Changes
from tandem_operator.planning.status import FAILED, READY, name_taken, settled
from tandem_operator.settings import OperatorSettings

DOWNLOADING = "Downloading"
RETRY_S = 600.0
"""After a Job has failed: a token or a volume may have been mended in the meantime."""

UNUSED_S = 300.0
"""A plan of a service that was made a moment ago may still begin workers with the commit before."""

REFUSED = "Refused"
"""Another pod of the Job would fail as well: a person has to change something."""

MAX_COMMITS = 16
_COMMIT = re.compile(r"[0-9a-f]{40}")
MAX_ERROR = 80


class DownloadResult(msgspec.Struct, frozen=True, kw_only=True):
    """Termination message of a pod that downloaded: a commit, or a reason."""

    commit: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{40})?$")] = ""
    size: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    fingerprint: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?$")] = ""
    reason: Annotated[str, msgspec.Meta(pattern=r"^([A-Z][A-Za-z]{1,40})?$")] = ""
    message: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    needed: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0


class ProgressReading(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod that downloads says; bytes, and bytes per second."""

    done: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    total: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    file: Annotated[str, msgspec.Meta(max_length=255, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""
    rate: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSeen:
    """A Job of the ModelCache that is not being deleted."""

    ref: Ref
    annotations: dict[str, str]
    succeeded: bool = False
    failed: str = ""
    """Kubernetes' reason for its failure, or `REFUSED`; empty without one."""
    halted: bool = False
    """It makes no further pods."""
    ended: str = ""
    """When it ended or failed, RFC 3339."""
    result: DownloadResult | None = None
    """Of the newest of its pods that has ended."""
    problem: str = ""
    """Why its pod does not run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheObserved:
    """All that a plan depends on, in addition to the spec."""

    now: str
    """RFC 3339."""
    jobs: tuple[JobSeen, ...] = ()
    ending: bool = False
    """A Job is being deleted: its pod may still write."""
    token_missing: bool = False
    """The Secret of the token does not exist."""
    progress: ProgressReading = field(default_factory=ProgressReading)
    used: frozenset[str] = frozenset()
    """Directories within the claim that pods mount, or would."""
    policies: tuple[Ref, ...] = ()
    """NetworkPolicies of the ModelCache."""
    foreign: frozenset[Ref] = frozenset()
    """Objects with a name that a plan needs, and with another owner."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CachePlan(Changes):
    """Of a ModelCache: at the end, its status is written."""

    status: ModelCacheStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheWanted:
    """A ModelCache by its name."""

    name: str
    namespace: str
    spec: ModelCacheSpec
    generation: int


@dataclass(frozen=True, slots=True)
class _State:
    """Of the source as the spec has it."""

    state: CacheState
    reason: str
    message: str = ""


def make_cache_plan(
    cache: CacheWanted, observed: CacheObserved, before: ModelCacheStatus, settings: OperatorSettings
) -> CachePlan:
    """`before`: the status as it is."""
    problems = list(cache_problems(cache.spec))
    if problems:
        return refused_cache(problems, observed.now, before, cache.generation)
    if observed.foreign:
        taken = name_taken(observed.foreign, "ModelCache")
        state = _State("Failed", taken.reason, taken.message)
        return CachePlan(status=_status(cache, observed, before, before.commits, state))
    request = request_of(cache.spec.source.hugging_face)
    commits = _commits(observed, before, request)
    if commits and _is_due(commits[0], observed.now):
        # A Job may be removing it: another one looks what is left, and downloads the rest.
        commits = commits[1:]
    if commits and commits[0].request == request:
        return _kept(cache, observed, before, commits, settings)
    return _fetched(cache, observed, before, commits, settings)


def refused_cache(problems: Sequence[str], now: str, before: ModelCacheStatus, generation: int) -> CachePlan:
    """Of a spec that cannot be served: nothing is changed, and the status reports why."""
    failed = condition(FAILED, True, "InvalidSpec", "; ".join(problems))
    kept = [one for one in before.conditions if one.type != FAILED]
    if not kept:
        kept = [condition(READY, False, failed.reason, failed.message)]
    timed = settled([*kept, failed], before.conditions, generation=generation, now=now)
    error = _short(f"InvalidSpec: {failed.message}")
    status = msgspec.structs.replace(
        before, observed_generation=generation, conditions=timed, state="Failed", error=error
    )
    return CachePlan(status=status)


def cache_problems(spec: ModelCacheSpec) -> Iterable[str]:
    """Errors of a spec that its schema cannot find, or that an older CRD lets pass; a sentence each."""
    source, storage = spec.source.hugging_face, spec.storage
    if ".." in source.revision.split("/"):
        yield "spec.source.huggingFace.revision: '..' leads out of the folder; name a branch, a tag or a commit"
    if storage.node:
        yield "spec.storage.node: needs hostPath volumes, which are not allowed; use claim or newClaim"
    elif (storage.claim is None) == (storage.new_claim is None):
        yield "spec.storage: give exactly one of claim and newClaim"
    if storage.claim is not None and ".." in storage.claim.path.split("/"):
        yield "spec.storage.claim.path: '..' leads out of the folder; name the folder itself"
    if storage.new_claim is not None and parse_quantity(storage.new_claim.size) < 1:
        yield f"spec.storage.newClaim.size: {storage.new_claim.size} is no size; write it like 200Gi"
    yield from resource_problems("spec.download.resources", spec.download.resources)


def _commits(observed: CacheObserved, before: ModelCacheStatus, request: str) -> list[CachedCommit]:
    """Those on the volume: that of `request` first, if it is whole."""
    commits = list(before.commits)
    for job in observed.jobs:
        asked, result = job.annotations.get(REQUEST, ""), job.result
        if job.succeeded and asked and result is not None and result.commit and result.fingerprint:
            commits = [one for one in commits if one.commit != result.commit]
            found = CachedCommit(commit=result.commit, request=asked, size=result.size, fingerprint=result.fingerprint)
            commits.insert(0 if asked == request else len(commits), found)
        if job.succeeded and KEEP in job.annotations:
            stay = job.annotations[KEEP].split(",")
            commits = [one for one in commits if one.commit in stay]
    return sorted(commits, key=lambda one: one.request != request)[:MAX_COMMITS]


def _kept(
    cache: CacheWanted,
    observed: CacheObserved,
    before: ModelCacheStatus,
    commits: list[CachedCommit],
    settings: OperatorSettings,
) -> CachePlan:
    """The commit is there; others go when no workers use them."""
    commits = _aged(cache, observed, commits)
    job = _prune(cache, observed, commits, settings)
    claim = claim_name_of(cache.name, cache.spec)
    state = _State("Ready", "Whole", f"commit {commits[0].commit} is on claim {claim!r}")
    return _carried(cache, observed, before, commits, state, job, settings)


def _aged(cache: CacheWanted, observed: CacheObserved, commits: Sequence[CachedCommit]) -> list[CachedCommit]:
    """With the times since which they are unused; the first is the one that services get."""
    folder, aged = folder_of(cache.name, cache.spec), []
    for number, one in enumerate(commits):
        used = number == 0 or f"{folder}/{one.commit}" in observed.used
        aged.append(msgspec.structs.replace(one, unused_since="" if used else one.unused_since or observed.now))
    return aged


def _prune(
    cache: CacheWanted, observed: CacheObserved, commits: Sequence[CachedCommit], settings: OperatorSettings
) -> Manifest | None:
    """The Job that removes what has been unused for long enough; None without such a commit."""
    due = [one.commit for one in commits if _is_due(one, observed.now)]
    if not due:
        return None
    first, *others = (one.commit for one in commits if one.commit not in due)
    # Those too that a status which was lost has named.
    others += (one for one in _mounted_commits(cache, observed) if one not in (first, *others, *due))
    return prune_job(cache.name, cache.namespace, cache.spec, settings, first, others)


def _is_due(commit: CachedCommit, now: str) -> bool:
    """Whether it was unused for so long that a Job removes it."""
    return bool(commit.unused_since) and _after(commit.unused_since, UNUSED_S) <= now


def _mounted_commits(cache: CacheWanted, observed: CacheObserved) -> list[str]:
    prefix = f"{folder_of(cache.name, cache.spec)}/"
    names = (one.removeprefix(prefix) for one in observed.used if one.startswith(prefix))
    return sorted(name for name in names if _COMMIT.fullmatch(name))


def _fetched(
    cache: CacheWanted,
    observed: CacheObserved,
    before: ModelCacheStatus,
    commits: list[CachedCommit],
    settings: OperatorSettings,
) -> CachePlan:
    wanted = download_job(cache.name, cache.namespace, cache.spec, settings)
    seen = next((job for job in observed.jobs if _is(job, wanted)), None)
    commits = _aged(cache, observed, commits)
    if observed.token_missing and seen is None:
        secret = cache.spec.source.hugging_face.token_secret
        assert secret is not None, "a Secret that is missing is named"
        text = f"spec.source.huggingFace.tokenSecret: Secret {secret.name!r} does not exist yet; create it"
        state = _State("Pending", "SecretMissing", text)
        return _carried(cache, observed, before, commits, state, None, settings)
    if seen is not None and not seen.failed:
        return _carried(cache, observed, before, commits, _under_way(cache, seen, observed), wanted, settings)
    state = _under_way(cache, None, observed) if seen is None else _failure(cache, seen)
    # Room before the next attempt.
    job = _prune(cache, observed, commits, settings) or wanted
    return _carried(cache, observed, before, commits, state, job, settings)


def _is(job: JobSeen, wanted: Manifest | None) -> bool:
    if wanted is None:
        return False
    metadata = wanted["metadata"]
    return bool(job.ref.name == metadata["name"] and job.annotations.get(SPEC) == metadata["annotations"][SPEC])


def _carried(
    cache: CacheWanted,
    observed: CacheObserved,
    before: ModelCacheStatus,
    commits: list[CachedCommit],
    state: _State,
    job: Manifest | None,
    settings: OperatorSettings,
) -> CachePlan:
    """`job`: the one that is to be there. One at a time, so that two pods never write to the volume."""
    name, namespace, spec = cache.name, cache.namespace, cache.spec
    superfluous = [one.ref for one in observed.jobs if not _is(one, job) or _is_over(one, observed.now)]
    policies = download_policy(name, namespace, spec, settings)
    superfluous += [one for one in observed.policies if one not in map(Ref.of, policies)]
    apply = [*new_claim(name, namespace, spec), *policies]
    if job is not None:
        apply += _job_to_apply(job, observed)
    return CachePlan(
        apply=tuple(apply), delete=tuple(superfluous), status=_status(cache, observed, before, commits, state)
    )


def _job_to_apply(job: Manifest, observed: CacheObserved) -> list[Manifest]:
    """It is made when no other pod may write, and never changed, but for the end of its attempts."""
    if not observed.jobs and not observed.ending:
        return [job]
    refused = any(_is(one, job) and one.failed == REFUSED and not one.halted for one in observed.jobs)
    return [halted(job)] if refused else []


def _is_over(job: JobSeen, now: str) -> bool:
    """Its result is known, or it failed long enough ago for another attempt."""
    return job.succeeded or (bool(job.failed and job.ended) and _after(job.ended, RETRY_S) <= now)


def _under_way(cache: CacheWanted, job: JobSeen | None, observed: CacheObserved) -> _State:
    source = cache.spec.source.hugging_face
    what = f"{source.id}@{source.revision}"
    if job is None and (observed.ending or observed.jobs):
        text = f"{what}: waits until the pod of the former Job has ended, so that two never write to the volume"
        return _State("Pending", "JobPending", text)
    if job is None:
        return _State("Pending", "JobPending", f"{what}: the Job is being created")
    if job.result is not None and job.result.reason and not job.succeeded and not observed.progress.total:
        return _State("Downloading", "Retrying", f"{what}: {job.result.message}")
    if job.problem:
        return _State("Pending", "PodPending", f"{what}: {job.problem}")
    shown = f", {observed.progress.file}" if observed.progress.file else ""
    return _State("Downloading", "Downloading", f"{what}{shown}")


_DEADLINE = "DeadlineExceeded"


def _failure(cache: CacheWanted, job: JobSeen) -> _State:
    """In the words of a field of the spec, where one of them is to change."""
    result, source, storage = job.result, cache.spec.source.hugging_face, cache.spec.storage
    if job.failed == _DEADLINE:
        text = (
            f"spec.download.timeoutSeconds: {cache.spec.download.timeout_seconds} s have passed; what has arrived is "
        )
        return _State("Failed", _DEADLINE, f"{text}kept, and the next attempt continues it")
    if result is None or not result.reason:
        return _State("Failed", "DownloadFailed", job.problem or f"the Job failed: {job.failed}")
    token = source.token_secret
    fields = {
        "HubAuthRefused": "spec.source.huggingFace.tokenSecret: "
        + (f"Secret {token.name!r}, key {token.key!r}" if token is not None else "not set"),
        "SourceNotFound": f"spec.source.huggingFace: {source.id}, revision {source.revision!r}",
        "NotServable": "spec.source.huggingFace.id",
    }
    if result.reason == "NoSpace":
        needed = f"; {result.needed} bytes are needed" if result.needed else ""
        new = storage.new_claim
        fix = (
            f"spec.storage.newClaim.size: {new.size} is too small{needed}; raise it"
            if new is not None
            else f"spec.storage.claim: {claim_name_of(cache.name, cache.spec)!r} is full{needed}; make it larger"
        )
        return _State("Failed", "NoSpace", f"{fix}: {result.message}")
    if result.reason == "VolumeNotWritable":
        return _State("Failed", result.reason, f"{result.message}. {_owned(cache)}")
    field = fields.get(result.reason)
    return _State("Failed", result.reason, f"{field}: {result.message}" if field else result.message)


def _owned(cache: CacheWanted) -> str:
    """What mends folders that kubelets made as root, where the driver of the volume gives them no group (`fsGroup`)."""
    user, claim = cache.spec.download.run_as_user, claim_name_of(cache.name, cache.spec)
    folder = f"/v/{folder_of(cache.name, cache.spec)}"
    return f"If folders belong to another user, as root with claim {claim!r} at /v: chown -R {user}:{user} {folder}"


def _status(
    cache: CacheWanted,
    observed: CacheObserved,
    before: ModelCacheStatus,
    commits: list[CachedCommit],
    state: _State,
) -> ModelCacheStatus:
    conditions = _conditions(commits, state)
    timed = settled(conditions, before.conditions, generation=cache.generation, now=observed.now)
    now = observed.progress if state.state == "Downloading" else ProgressReading()
    newest = commits[0] if commits else None
    bad = state.state == "Failed" or state.reason == "SecretMissing"
    size = now.total or (newest.size if newest is not None and state.state == "Ready" else 0)
    return ModelCacheStatus(
        observed_generation=cache.generation,
        conditions=timed,
        state=state.state,
        progress="100%" if state.state == "Ready" else f"{100 * now.done // now.total}%" if now.total else "",
        size=gigabytes(size) if size else "",
        error=_short(f"{state.reason}: {state.message}") if bad else "",
        claim_name=claim_name_of(cache.name, cache.spec),
        path=f"{folder_of(cache.name, cache.spec)}/{newest.commit}" if newest is not None else "",
        commit=newest.commit if newest is not None else "",
        bytes_done=now.done,
        bytes_total=now.total,
        bytes_per_second=now.rate,
        current_file=now.file,
        commits=commits,
    )


def _conditions(commits: Sequence[CachedCommit], state: _State) -> list[Condition]:
    former = f"commit {commits[0].commit} is there until the next one is whole" if commits else ""
    ready = (
        condition(READY, True, state.reason, state.message)
        if state.state == "Ready"
        else condition(READY, bool(commits), "FormerCommit" if commits else state.reason, former or state.message)
    )
    under_way, failed = state.state == "Downloading", state.state == "Failed"
    return [
        ready,
        condition(DOWNLOADING, under_way, state.reason, state.message if under_way else ""),
        condition(FAILED, failed, state.reason, state.message if failed else ""),
    ]


def _short(text: str) -> str:
    return text if len(text) <= MAX_ERROR else f"{text[: MAX_ERROR - 1]}…"


def _after(moment: str, seconds: float) -> str:
    """RFC 3339, as which times compare."""
    later = datetime.fromisoformat(moment) + timedelta(seconds=seconds)
    return later.strftime("%Y-%m-%dT%H:%M:%SZ")


def gigabytes(size: int) -> str:
    """For a column of `kubectl get`."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
