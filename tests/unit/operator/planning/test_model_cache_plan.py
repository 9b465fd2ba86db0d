"""Plans of ModelCaches: from the first Job to the removal of unused commits."""

from dataclasses import replace

import msgspec
import pytest

from tandem_operator.api.model_cache import ModelCacheSpec, ModelCacheStatus
from tandem_operator.api.model_service import ModelServiceSpec, ModelServiceStatus
from tandem_operator.api.sources import ClaimSource
from tandem_operator.api.types import condition
from tandem_operator.builders.served import served
from tandem_operator.planning.model_cache import (
    CacheObserved,
    CacheWanted,
    DownloadResult,
    JobSeen,
    ProgressReading,
    make_cache_plan,
)
from tandem_operator.planning.observed import CacheSeen, Observed, Ref
from tandem_operator.planning.plan import make_plan
from tandem_operator.planning.status import NEEDED, ready
from tandem_operator.settings import OperatorSettings

A, B = "a" * 40, "b" * 40
PRINT = "f" * 64
NOW = "2026-01-01T00:00:00Z"


def wanted(revision="v1", storage=None, download=None, **source):
    body = {
        "source": {"huggingFace": {"id": "org/mini", "revision": revision, **source}},
        "storage": storage or {"newClaim": {"size": "10Gi"}},
        "download": download or {},
    }
    return CacheWanted(name="qwen", namespace="models", spec=msgspec.convert(body, ModelCacheSpec), generation=3)


class Cluster:
    """Carries plans out, without Kubernetes."""

    def __init__(self):
        self.jobs, self.status, self.others = {}, ModelCacheStatus(), {}
        self.now, self.used, self.progress, self.token_missing = NOW, frozenset(), ProgressReading(), False

    def observed(self):
        return CacheObserved(
            now=self.now,
            jobs=tuple(self.jobs.values()),
            used=self.used,
            progress=self.progress,
            token_missing=self.token_missing,
            policies=tuple(Ref.of(one) for kind, one in self.others.items() if kind == "NetworkPolicy"),
        )

    def reconcile(self, cache):
        plan = make_cache_plan(cache, self.observed(), self.status, OperatorSettings())
        for manifest in plan.apply:
            ref = Ref.of(manifest)
            if ref.kind == "Job" and manifest["spec"].get("parallelism") == 0:
                self.jobs[ref] = replace(self.jobs[ref], halted=True)
            elif ref.kind == "Job":
                assert not self.jobs, "one Job at a time"
                self.jobs[ref] = JobSeen(ref=ref, annotations=manifest["metadata"]["annotations"])
            else:
                self.others[ref.kind] = manifest
        for ref in plan.delete:
            if ref.kind == "Job":
                del self.jobs[ref]
            else:
                assert Ref.of(self.others.pop(ref.kind)) == ref
        self.status = plan.status
        return plan

    def settle(self, cache):
        """Until nothing changes."""
        for _ in range(10):
            before = (dict(self.jobs), self.status)
            self.reconcile(cache)
            if before == (self.jobs, self.status):
                return
        raise AssertionError("the plans have no end")

    @property
    def job(self):
        (one,) = self.jobs.values()
        return one

    def ends(self, **fields):
        self.jobs[self.job.ref] = replace(self.job, ended=self.now, **fields)

    def succeeds(self, commit=A):
        self.ends(succeeded=True, result=DownloadResult(commit=commit, size=5_000_000_000, fingerprint=PRINT))

    def fails(self, reason, needed=0):
        result = DownloadResult(reason=reason, message="what happened", needed=needed)
        self.ends(failed="Refused", result=result)

    def condition(self, kind):
        one = next(one for one in self.status.conditions if one.type == kind)
        return one.status, one.reason


@pytest.fixture
def cluster():
    return Cluster()


def downloaded(cluster, cache, commit=A):
    cluster.settle(cache)
    cluster.succeeds(commit)
    cluster.settle(cache)


def test_one_job_downloads_until_the_commit_is_whole(cluster):
    cluster.settle(wanted())
    assert (cluster.status.state, cluster.condition("Ready")) == ("Downloading", ("False", "Downloading"))
    assert set(cluster.others) == {"PersistentVolumeClaim", "NetworkPolicy"}
    cluster.progress = ProgressReading(done=10, total=40, file="model.safetensors", rate=7)
    cluster.settle(wanted())
    status = cluster.status
    assert (status.progress, status.bytes_done, status.bytes_total, status.bytes_per_second) == ("25%", 10, 40, 7)
    assert status.current_file == "model.safetensors"
    cluster.succeeds()
    cluster.settle(wanted())
    status = cluster.status
    assert (status.state, status.progress, status.size, status.commit) == ("Ready", "100%", "5.0 GB", A)
    assert (status.claim_name, status.path) == ("qwen", f"tandem-cache/qwen/{A}")
    assert cluster.condition("Ready") == ("True", "Whole")
    assert cluster.jobs == {}


def test_former_commit_stays_until_the_next_one_is_whole(cluster):
    downloaded(cluster, wanted())
    cluster.used = frozenset({f"tandem-cache/qwen/{A}"})
    cluster.settle(wanted("v2"))
    assert (cluster.status.state, cluster.status.commit) == ("Downloading", A)
    assert cluster.condition("Ready") == ("True", "FormerCommit")
    cluster.succeeds(B)
    cluster.settle(wanted("v2"))
    assert [one.commit for one in cluster.status.commits] == [B, A]
    assert cluster.status.path.endswith(B)
    assert cluster.jobs == {}, "workers use the former one"


def test_unused_commit_is_removed_after_a_delay(cluster):
    downloaded(cluster, wanted())
    downloaded(cluster, wanted("v2"), B)
    assert cluster.status.commits[1].unused_since == NOW
    assert cluster.jobs == {}
    cluster.now = "2026-01-01T00:04:59Z"
    cluster.settle(wanted("v2"))
    assert cluster.jobs == {}
    cluster.now = "2026-01-01T00:05:00Z"
    cluster.settle(wanted("v2"))
    assert "-prune-" in cluster.job.ref.name
    assert cluster.status.state == "Ready"
    cluster.ends(succeeded=True)
    cluster.settle(wanted("v2"))
    assert [one.commit for one in cluster.status.commits] == [B]
    assert cluster.jobs == {}


def test_commit_that_is_used_again_stays(cluster):
    downloaded(cluster, wanted())
    downloaded(cluster, wanted("v2"), B)
    cluster.now = "2026-01-01T00:10:00Z"
    cluster.used = frozenset({f"tandem-cache/qwen/{A}"})
    cluster.settle(wanted("v2"))
    assert cluster.jobs == {}
    assert cluster.status.commits[1].unused_since == ""


def test_unused_commit_makes_room_for_the_next_attempt(cluster):
    downloaded(cluster, wanted())
    downloaded(cluster, wanted("v2"), B)
    cluster.settle(wanted("v3"))
    cluster.fails("NoSpace")
    cluster.now = "2026-01-01T00:05:00Z"
    cluster.settle(wanted("v3"))
    assert "-prune-" in cluster.job.ref.name
    assert cluster.status.path.endswith(B)
    cluster.ends(succeeded=True)
    cluster.settle(wanted("v3"))
    assert [one.commit for one in cluster.status.commits] == [B]
    assert "-download-" in cluster.job.ref.name


def test_superseded_download_is_not_served(cluster):
    downloaded(cluster, wanted())
    cluster.settle(wanted("v2"))
    cluster.succeeds(B)
    cluster.settle(wanted("v3"))
    assert cluster.status.path.endswith(A)
    assert [one.commit for one in cluster.status.commits] == [A, B]


def test_commit_that_a_job_may_be_removing_is_looked_at_again(cluster):
    downloaded(cluster, wanted())
    downloaded(cluster, wanted("v2"), B)
    cluster.now = "2026-01-01T00:05:00Z"
    cluster.settle(wanted("v2"))
    assert "-prune-" in cluster.job.ref.name
    cluster.settle(wanted("v1"))
    assert (cluster.status.state, cluster.status.commit) == ("Downloading", B)
    assert "-download-" in cluster.job.ref.name
    cluster.succeeds(A)
    cluster.settle(wanted("v1"))
    assert (cluster.status.state, cluster.status.commit) == ("Ready", A)


def test_commit_in_use_stays_though_the_status_lost_it(cluster):
    downloaded(cluster, wanted())
    downloaded(cluster, wanted("v2"), B)
    lost = "c" * 40
    cluster.used = frozenset({f"tandem-cache/qwen/{lost}", "tandem-cache/other/x", "tandem-cache/qwen/x"})
    cluster.now = "2026-01-01T00:05:00Z"
    cluster.settle(wanted("v2"))
    assert cluster.job.annotations["tandem.dev/keep"].split(",") == [B, lost]


def test_rollback_downloads_nothing(cluster):
    downloaded(cluster, wanted())
    downloaded(cluster, wanted("v2"), B)
    cluster.settle(wanted("v1"))
    assert (cluster.status.state, cluster.status.commit, cluster.jobs) == ("Ready", A, {})


@pytest.mark.parametrize(
    ("reason", "storage", "token", "words"),
    [
        ("HubAuthRefused", None, {"name": "hub", "key": "t"}, ["tokenSecret", "Secret 'hub'", "key 't'"]),
        ("HubAuthRefused", None, None, ["tokenSecret: not set"]),
        ("SourceNotFound", None, None, ["org/mini", "revision 'v1'"]),
        ("NoSpace", None, None, ["spec.storage.newClaim.size: 10Gi", "77 bytes are needed", "raise it"]),
        ("NoSpace", {"claim": {"claimName": "nas"}}, None, ["spec.storage.claim: 'nas'", "77 bytes are needed"]),
        (
            "VolumeNotWritable",
            {"claim": {"claimName": "nas", "path": "models"}},
            None,
            ["what happened", "claim 'nas' at /v: chown -R 10001:10001 /v/models/tandem-cache/qwen"],
        ),
        ("ChecksumMismatch", None, None, ["what happened"]),
    ],
)
def test_failure_names_the_field_and_the_fix(cluster, reason, storage, token, words):
    cache = wanted(storage=storage, **({"tokenSecret": token} if token else {}))
    cluster.settle(cache)
    cluster.fails(reason, needed=77)
    cluster.settle(cache)
    assert (cluster.status.state, cluster.condition("Failed")) == ("Failed", ("True", reason))
    (message,) = [one.message for one in cluster.status.conditions if one.type == "Failed"]
    assert all(word in message for word in words), message
    assert cluster.status.error.startswith(reason)


def test_failed_download_is_retried_later_or_with_another_spec(cluster):
    cluster.settle(wanted())
    cluster.fails("NoSpace")
    cluster.settle(wanted())
    assert cluster.job.halted, "another pod would fail as well"
    cluster.settle(wanted(storage={"newClaim": {"size": "20Gi"}}))
    assert not cluster.job.failed, "another spec is tried at once"
    cluster.fails("HubAuthRefused")
    cluster.now = "2026-01-01T00:09:59Z"
    cluster.settle(wanted(storage={"newClaim": {"size": "20Gi"}}))
    assert cluster.job.failed
    cluster.now = "2026-01-01T00:10:00Z"
    cluster.settle(wanted(storage={"newClaim": {"size": "20Gi"}}))
    assert not cluster.job.failed


def test_download_deadline_and_failure_have_own_reasons(cluster):
    cluster.settle(wanted())
    cluster.ends(failed="DeadlineExceeded")
    cluster.settle(wanted())
    assert cluster.condition("Failed") == ("True", "DeadlineExceeded")
    cluster.ends(failed="BackoffLimitExceeded")
    cluster.settle(wanted())
    assert cluster.condition("Failed") == ("True", "DownloadFailed")


def test_job_without_a_result_is_run_again(cluster):
    cluster.settle(wanted())
    first = cluster.job
    cluster.ends(succeeded=True)
    cluster.settle(wanted())
    assert cluster.job == first
    assert cluster.status.state == "Downloading"


def test_missing_token_makes_no_job(cluster):
    cache = wanted(tokenSecret={"name": "hub", "key": "t"})
    cluster.token_missing = True
    cluster.settle(cache)
    assert (cluster.jobs, cluster.condition("Ready")) == ({}, ("False", "SecretMissing"))
    cluster.token_missing = False
    cluster.settle(cache)
    assert cluster.job


@pytest.mark.parametrize("ready", [False, True])
def test_policy_that_is_no_longer_wanted_is_deleted(cluster, ready):
    """It stayed, and its pods were held to a policy that the spec does not have."""
    (downloaded if ready else Cluster.settle)(cluster, wanted())
    cluster.settle(wanted(download={"networkPolicy": False}))
    assert set(cluster.others) == {"PersistentVolumeClaim"}
    cluster.settle(wanted())
    assert set(cluster.others) == {"PersistentVolumeClaim", "NetworkPolicy"}


def test_no_job_begins_while_another_may_still_write():
    observed = CacheObserved(now=NOW, ending=True)
    plan = make_cache_plan(wanted(), observed, ModelCacheStatus(), OperatorSettings())
    assert [one["kind"] for one in plan.apply] == ["PersistentVolumeClaim", "NetworkPolicy"]
    assert "until the pod of the former Job has ended" in plan.status.conditions[0].message


@pytest.mark.parametrize(
    ("cache", "field"),
    [
        (wanted("a/../b"), "spec.source.huggingFace.revision"),
        (wanted(storage={"node": {"x": 1}}), "spec.storage.node"),
        (wanted(storage={"claim": {"claimName": "a"}, "newClaim": {"size": "1Gi"}}), "spec.storage"),
        (wanted(storage={"newClaim": {"size": "0"}}), "spec.storage.newClaim.size"),
        (
            wanted(download={"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}}),
            "spec.download.resources.requests[cpu]",
        ),
    ],
)
def test_bad_spec_changes_nothing_and_names_the_field(cluster, cache, field):
    plan = cluster.reconcile(cache)
    assert (plan.apply, plan.delete, cluster.status.state) == ((), (), "Failed")
    (message,) = [one.message for one in cluster.status.conditions if one.type == "Failed"]
    assert message.startswith(f"{field}:")


def test_claim_name_that_is_taken_is_reported_as_nametaken():
    taken = frozenset({Ref(api_version="v1", kind="PersistentVolumeClaim", name="qwen")})
    observed = CacheObserved(now=NOW, foreign=taken)
    plan = make_cache_plan(wanted(), observed, ModelCacheStatus(), OperatorSettings())
    assert plan.apply == ()
    assert plan.status.error.startswith("NameTaken: PersistentVolumeClaim 'qwen'")
    ready = next(one for one in plan.status.conditions if one.type == "Ready")
    assert ready.message.endswith("are removed when no pod uses them")


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (CacheSeen(name="qwen"), "CacheMissing"),
        (CacheSeen(name="qwen", exists=True), "CachePending"),
        (CacheSeen(name="qwen", exists=True, reason="NoSpace", message="too small"), "NoSpace"),
    ],
)
def test_service_waits_for_its_cache_without_pods(cache, reason):
    spec = msgspec.convert({"model": {"cacheRef": {"name": "qwen"}}}, ModelServiceSpec)
    service = served("chat", "models", spec, OperatorSettings())
    plan = make_plan(service, Observed(now=NOW, cache=cache), ModelServiceStatus(), 1, OperatorSettings())
    assert (plan.apply, plan.delete, plan.scale) == ((), (), ())
    by_type = {one.type: (one.status, one.reason) for one in plan.status.conditions}
    assert by_type["ModelCached"] == ("False", reason)
    assert by_type["Ready"] == ("False", reason)


def service_of_cache(cache, replicas=1):
    """As a reconciliation makes it of a service that names the ModelCache."""
    spec = {"model": {"cacheRef": {"name": "qwen"}}, "decode": {"replicas": replicas}}
    return served("chat", "models", msgspec.convert(spec, ModelServiceSpec), OperatorSettings(), cache=cache.served)


@pytest.mark.parametrize("exists", [False, True], ids=["missing", "pending"])
def test_service_without_its_cache_keeps_and_scales_workers(exists):
    mounted = ClaimSource(claim_name="qwen", path=f"tandem-cache/qwen/{A}")
    before = CacheSeen(name="qwen", exists=True, claim=mounted, commit=A)
    first = make_plan(
        service_of_cache(before), Observed(now=NOW, cache=before), ModelServiceStatus(), 1, OperatorSettings()
    )
    after = CacheSeen(name="qwen", exists=exists, mounted=mounted)
    plan = make_plan(service_of_cache(after, 3), Observed(now=NOW, cache=after), first.status, 2, OperatorSettings())
    assert plan.status.revision == first.status.revision
    wanted = {one["metadata"]["name"]: one["spec"]["replicas"] for one in plan.apply if one["kind"] == "Deployment"}
    assert wanted[f"chat-decode-{plan.status.revision}"] == 3
    cached = next(one for one in plan.status.conditions if one.type == "ModelCached")
    assert (cached.status, cached.reason) == ("False", "CachePending" if exists else "CacheMissing")
    assert "'qwen'" in cached.message
    assert cached.message.endswith(f"workers keep {mounted.path}, and new ones get it while claim 'qwen' exists")


def test_ready_does_not_wait_for_a_cache_whose_commit_is_mounted():
    true = [condition(kind, True, "Fine") for kind in NEEDED]
    missing = condition("ModelCached", False, "CacheMissing")
    kept = CacheSeen(name="qwen", mounted=ClaimSource(claim_name="qwen", path="x"))
    assert ready([*true, missing], kept).status == "True"
    assert ready([*true, missing], CacheSeen(name="qwen")).reason == "CacheMissing"
