"""What a ModelCache and the ModelServices that name it have to do with each other, from the known objects."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from tandem_engine.base.addresses import Address
from tandem_operator.api.model_cache import ModelCacheStatus
from tandem_operator.api.sources import ClaimSource
from tandem_operator.builders.model_cache import CONTAINER, PERMANENT_STATUS, PORT_NAME
from tandem_operator.builders.model_mount import MODEL_VOLUME
from tandem_operator.builders.models_file import MODELS_FILE
from tandem_operator.builders.naming import REVISION_LABEL, ROLE_LABEL
from tandem_operator.builders.served import CLAIMS_FOLDER
from tandem_operator.controller.store import (
    DEPLOYMENT,
    JOB,
    LEADER_WORKER_SET,
    MODEL_CACHE,
    NETWORK_POLICY,
    POD,
    Seen,
    ServiceKey,
    Store,
    cache_name_of,
    status_as,
    status_of,
)
from tandem_operator.planning.model_cache import REFUSED, DownloadResult, JobSeen
from tandem_operator.planning.model_gateway import Former
from tandem_operator.planning.observed import CacheSeen, Ref
from tandem_operator.planning.pod_failure import on_one_line, pod_failure
from tandem_operator.planning.status import READY
from tandem_operator.telemetry.pods import PROGRESS_PATH

_ENDED = ("Succeeded", "Failed")
MAX_RESULT = 4096


def cache_of(store: Store, service: Seen) -> CacheSeen | None:
    """The ModelCache that a ModelService names, as plans use it; None without `cacheRef`."""
    name = cache_name_of(service)
    if not name:
        return None
    mounted = _commit_of_workers(store, service)
    seen = store.service(ServiceKey(service.namespace, name, MODEL_CACHE.name))
    if seen is None:
        return CacheSeen(name=name, mounted=mounted)
    if seen.deleting:
        return CacheSeen(name=name, exists=True, mounted=mounted, reason="CacheMissing", message="it is being deleted")
    status = status_as(seen, ModelCacheStatus)
    claim = ClaimSource(claim_name=status.claim_name, path=status.path) if status.path else None
    ready = next((one for one in status.conditions if one.type == READY), None)
    return CacheSeen(
        name=name,
        exists=True,
        claim=claim,
        mounted=mounted,
        commit=status.commit,
        reason=ready.reason if ready is not None else "",
        message=ready.message if ready is not None else "",
    )


def _commit_of_workers(store: Store, service: Seen) -> ClaimSource | None:
    """Directory that the workers of its revision mount; that of the newest workers where this revision has none."""
    kinds, revision = (DEPLOYMENT.name, LEADER_WORKER_SET.name), status_of(service).revision
    mine = [one for one in store.parts(service.key) if one.owner == service.uid and one.ref.kind in kinds]
    workers = [one for one in mine if ROLE_LABEL in one.body["metadata"].get("labels", {}) and not one.deleting]

    def rank(one: Seen) -> tuple[bool, str]:
        metadata = one.body["metadata"]
        return metadata["labels"].get(REVISION_LABEL) == revision, metadata.get("creationTimestamp", "")

    newest_first = sorted(workers, key=rank, reverse=True)
    return next((found for one in newest_first for pod in _templates(one) for found in _commits(pod)), None)


def _commits(pod: dict[str, Any]) -> Iterator[ClaimSource]:
    """The directory of a claim that a pod mounts as its model."""
    volumes = [one for one in pod.get("volumes", ()) if one["name"] == MODEL_VOLUME and "persistentVolumeClaim" in one]
    for volume in volumes:
        claim = volume["persistentVolumeClaim"]["claimName"]
        mounts = [mount for container in pod["containers"] for mount in container.get("volumeMounts", ())]
        places = [mount["subPath"] for mount in mounts if mount["name"] == MODEL_VOLUME and "subPath" in mount]
        yield from (ClaimSource(claim_name=claim, path=place) for place in places)


def directories_in_use(workloads: Iterable[Seen], claim: str) -> frozenset[str]:
    """Directories within a claim that `workloads` mount."""
    return frozenset(place for one in workloads for pod in _templates(one) for place in _mounted(pod, claim))


def directories_of_gateways(model_files: Iterable[Seen], claim: str) -> frozenset[str]:
    """Directories within a claim from which gateways of ModelGateways read tokenizers: they mount all of it."""
    prefix = f"{CLAIMS_FOLDER}/{claim}/"
    texts = (seen.body.get("data", {}).get(MODELS_FILE, "") for seen in model_files)
    models = (str(entry.get("model", "")) for text in texts for entry in Former.of(text, {}).entries.values())
    return frozenset(model.removeprefix(prefix) for model in models if model.startswith(prefix))


def _templates(workload: Seen) -> Iterator[dict[str, Any]]:
    """Pod specs of a Deployment or a LeaderWorkerSet, and that of a pod that has not ended."""
    spec: dict[str, Any] = workload.body["spec"]
    if workload.ref.kind == POD.name:
        if workload.body["status"].get("phase") not in _ENDED:
            yield spec
        return
    groups = spec.get("leaderWorkerTemplate", {})
    for template in (spec.get("template"), groups.get("leaderTemplate"), groups.get("workerTemplate")):
        if template is not None:
            yield template.get("spec", {})


def _mounted(pod: dict[str, Any], claim: str) -> Iterator[str]:
    volumes = {
        one["name"] for one in pod.get("volumes", ()) if one.get("persistentVolumeClaim", {}).get("claimName") == claim
    }
    for container in pod.get("containers", ()):
        for mount in container.get("volumeMounts", ()):
            if mount["name"] in volumes:
                yield mount.get("subPath", "")


def jobs_of(parts: Iterable[Seen], uid: str) -> tuple[JobSeen, ...]:
    """Jobs of the ModelCache of that `uid` that are not being deleted."""
    parts = list(parts)
    jobs = [one for one in parts if one.ref.kind == JOB.name and one.owner == uid and not one.deleting]
    return tuple(_job(job, [pod for pod in parts if pod.ref.kind == POD.name and pod.owner == job.uid]) for job in jobs)


def policies_of(parts: Iterable[Seen], uid: str) -> tuple[Ref, ...]:
    """NetworkPolicies of the ModelCache of that `uid`."""
    return tuple(one.ref for one in parts if one.ref.kind == NETWORK_POLICY.name and one.owner == uid)


def has_former_writers(parts: Iterable[Seen], uid: str) -> bool:
    """Whether a Job is being deleted, or a pod of one that is gone may still write."""
    parts = list(parts)
    jobs = {one.uid: one for one in parts if one.ref.kind == JOB.name and one.owner == uid}
    if any(job.deleting for job in jobs.values()):
        return True
    pods = (one for one in parts if one.ref.kind == POD.name and one.owner not in jobs)
    return any(pod.body["status"].get("phase") not in _ENDED for pod in pods)


def progress_url(parts: Iterable[Seen]) -> str | None:
    """Of the pod that downloads; None while there is none."""
    for pod in parts:
        status = pod.body.get("status", {})
        if pod.ref.kind != POD.name or pod.deleting or status.get("phase") != "Running" or not status.get("podIP"):
            continue
        for port in _ports(pod):
            return Address(status["podIP"], port).url(PROGRESS_PATH)
    return None


def _ports(pod: Seen) -> Iterator[int]:
    for container in pod.body["spec"].get("containers", ()):
        for port in container.get("ports", ()):
            if port.get("name") == PORT_NAME:
                yield port["containerPort"]


def _job(job: Seen, pods: list[Seen]) -> JobSeen:
    status = job.body.get("status", {})
    conditions = {one["type"]: one for one in status.get("conditions", ()) if one["status"] == "True"}
    failed = conditions.get("Failed")
    ended = failed or conditions.get("Complete")
    newest = sorted(pods, key=lambda pod: pod.body["metadata"].get("creationTimestamp", ""), reverse=True)
    endings = [ending for pod in newest if (ending := _ending(pod))]
    refused = bool(endings) and endings[0].get("exitCode") == PERMANENT_STATUS
    reason = failed.get("reason", "Failed") if failed is not None else REFUSED if refused else ""
    return JobSeen(
        ref=job.ref,
        annotations=dict(job.body["metadata"].get("annotations", {})),
        succeeded="Complete" in conditions,
        failed=reason,
        halted=job.body.get("spec", {}).get("parallelism") == 0,
        ended=_ended_at(job, ended, endings),
        result=next((result for ending in endings if (result := _result(ending)) is not None), None),
        problem=_problem(job, newest[0] if newest else None, ended=bool(ended) or refused),
    )


def _problem(job: Seen, newest: Seen | None, *, ended: bool) -> str:
    """Why it does not download. Reasons that are in events alone (quotas, volumes that cannot be attached) are not
    known: the message says where they are."""
    if newest is None:
        return "" if ended else f"the Job has no pod yet; `kubectl describe job {job.ref.name}` says why it takes long"
    name, status = newest.ref.name, newest.body["status"]
    waits = f"pod {name} waits for its node, volume or image; `kubectl describe pod {name}` says why it takes long"
    pending = [waits] if status.get("phase") == "Pending" and not ended else []
    return next(iter([*pod_failure(status), *pending]), "")


def _ended_at(job: Seen, condition: dict[str, Any] | None, endings: list[dict[str, Any]]) -> str:
    """When it ended, or its newest pod; RFC 3339."""
    times = [condition.get("lastTransitionTime", "")] if condition is not None else []
    times += [one.get("finishedAt") or "" for one in endings[:1]]
    return next(filter(None, times), str(job.body["metadata"].get("creationTimestamp", "")))


def _ending(pod: Seen) -> dict[str, Any]:
    """How the container that downloads has ended; empty while it has not."""
    for one in pod.body["status"].get("containerStatuses", ()):
        if one["name"] == CONTAINER:
            ended: dict[str, Any] = one.get("state", {}).get("terminated") or {}
            return ended
    return {}


def _result(ending: dict[str, Any]) -> DownloadResult | None:
    """Its termination message; None where that is no result."""
    try:
        result = msgspec.json.decode(ending.get("message", "")[:MAX_RESULT], type=DownloadResult)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    return msgspec.structs.replace(result, message=on_one_line(result.message))
