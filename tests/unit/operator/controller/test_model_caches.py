"""What a reconciliation of a ModelCache reads of Jobs, pods and workers, and what it writes."""

import json
from datetime import UTC, datetime

import httpx
import pytest

from tandem_operator.api.model_cache import ModelCacheStatus
from tandem_operator.api.sources import ClaimSource
from tandem_operator.builders.naming import cache_labels_of
from tandem_operator.builders.served import served
from tandem_operator.builders.worker import workers
from tandem_operator.controller.applier import Applier
from tandem_operator.controller.cache_reconcile import CachePoller, CacheReconciler
from tandem_operator.controller.model_caches import (
    cache_of,
    directories_in_use,
    directories_of_gateways,
    has_former_writers,
    jobs_of,
    progress_url,
)
from tandem_operator.controller.model_gateways import namesakes
from tandem_operator.controller.store import (
    CLAIM,
    CONFIG_MAP,
    DEPLOYMENT,
    JOB,
    MODEL_CACHE,
    MODEL_SERVICE,
    POD,
    Seen,
    ServiceKey,
    Store,
    spec_of,
)
from tandem_operator.planning.model_cache import ProgressReading
from tandem_operator.settings import OperatorSettings
from tandem_operator.telemetry.pods import fetch_progress
from tandem_testing.kube_gateways import behind, gateway_of, plan_of
from tandem_testing.kube_objects import a_service, an_object

KEY = ServiceKey("models", "qwen", "ModelCache")
COMMIT = "a" * 40
SPEC = {"source": {"huggingFace": {"id": "org/mini"}}, "storage": {"newClaim": {"size": "10Gi"}}}
LABELS = {"labels": cache_labels_of("qwen")}
UID = "uid-ModelCache-qwen"


def a_cache(**fields):
    return an_object(MODEL_CACHE, "qwen", **{"spec": SPEC, "metadata": {"generation": 2}, **fields})


def a_user(name="chat", cache="qwen"):
    return a_service(name, spec={"model": {"cacheRef": {"name": cache}}})


def a_job(name="qwen-download-1", *conditions, deleting=False):
    metadata = {**LABELS, **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleting else {})}
    return an_object(JOB, name, owner=UID, metadata=metadata, spec={}, status={"conditions": list(conditions)})


def a_pod(name="p", job="qwen-download-1", phase="Running", ended=None, **status):
    container = {"name": "download", "state": {"terminated": ended} if ended else {"running": {}}}
    spec = {"containers": [{"name": "download", "ports": [{"name": "progress", "containerPort": 8080}]}]}
    owners = [{"uid": f"uid-Job-{job}", "controller": True, "kind": "Job", "name": job}]
    metadata = {**LABELS, "ownerReferences": owners}
    body = {"phase": phase, "podIP": "10.0.0.1", "containerStatuses": [container], **status}
    return an_object(POD, name, metadata=metadata, spec=spec, status=body)


def ending(code, message):
    return {"exitCode": code, "message": message if isinstance(message, str) else json.dumps(message)}


COMPLETE = {"type": "Complete", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
FAILED = {**COMPLETE, "type": "Failed", "reason": "BackoffLimitExceeded"}


def a_store(*seen: Seen) -> Store:
    store = Store()
    for one in seen:
        store.put(one)
    return store


def test_change_of_a_cache_concerns_the_services_that_name_it():
    store = a_store(a_cache(), a_user(), a_user("other", "else"), a_service("plain"))
    assert store.related(KEY) == [ServiceKey("models", "chat")]
    # It may have named another one before.
    assert store.related(ServiceKey("models", "plain")) == [KEY]
    assert [one.key for one in store.caches()] == [KEY]


def test_objects_of_a_cache_concern_it_and_no_namesake():
    assert {a_job().key, a_pod().key} == {KEY}
    store = a_store(a_cache(), a_service("qwen"))
    assert namesakes(store, ServiceKey("models", "qwen")) == frozenset()


def test_result_is_the_termination_message_of_the_newest_pod():
    old = a_pod("old", phase="Failed", ended=ending(3, {"reason": "HubUnreachable", "message": "a\nb\x1b[31m"}))
    new = a_pod("new", phase="Succeeded", ended=ending(0, {"commit": COMMIT, "size": 5, "fingerprint": "f" * 64}))
    old.body["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    new.body["metadata"]["creationTimestamp"] = "2026-01-01T00:00:09Z"
    (job,) = jobs_of([a_job("qwen-download-1", COMPLETE), old, new], UID)
    assert (job.succeeded, job.result.commit, job.ended) == (True, COMMIT, "2026-01-01T00:00:00Z")
    (job,) = jobs_of([a_job("qwen-download-1", FAILED), old], UID)
    assert (job.failed, job.result.reason, job.result.message) == ("BackoffLimitExceeded", "HubUnreachable", "a b [31m")


def test_status_2_ends_the_attempts_of_a_job():
    message = {"reason": "NoSpace", "message": "full", "needed": 7}
    ended = ending(2, message) | {"finishedAt": "2026-01-01T00:00:05Z"}
    (job,) = jobs_of([a_job(), a_pod(phase="Failed", ended=ended)], UID)
    assert (job.failed, job.halted, job.ended, job.result.needed) == ("Refused", False, ended["finishedAt"], 7)


@pytest.mark.parametrize(
    "message",
    [
        "",
        "Killed",
        "[]",
        '{"commit": "../x"}',
        '{"size": -1}',
        pytest.param("{" * 5000, id="long"),
        pytest.param('{"x": ' + "[" * 2000, id="deep"),
        pytest.param("\ud800", id="surrogate"),
    ],
)
def test_message_that_is_no_result_is_none(message):
    (job,) = jobs_of([a_job("qwen-download-1", COMPLETE), a_pod(phase="Failed", ended=ending(1, message))], UID)
    assert job.result is None


def test_job_that_does_not_run_says_where_the_reason_is():
    (job,) = jobs_of([a_job()], UID)
    assert "kubectl describe job qwen-download-1" in job.problem
    (job,) = jobs_of([a_job(), a_pod(phase="Pending", containerStatuses=[])], UID)
    assert "kubectl describe pod p" in job.problem
    unscheduled = {"type": "PodScheduled", "status": "False", "message": "no node has room"}
    (job,) = jobs_of([a_job(), a_pod(phase="Pending", containerStatuses=[], conditions=[unscheduled])], UID)
    assert job.problem == "no node has room"
    for seen in ([a_job(), a_pod()], [a_job("qwen-download-1", COMPLETE)], [a_job("qwen-download-1", FAILED)]):
        (job,) = jobs_of(seen, UID)
        assert job.problem == ""


def test_jobs_of_others_and_those_that_go_do_not_count():
    foreign = an_object(JOB, "qwen-download-2", owner="uid-of-another", metadata=LABELS, spec={})
    assert jobs_of([foreign, a_job("qwen-download-3", deleting=True)], UID) == ()


def test_pods_of_former_jobs_may_still_write():
    job = a_job()
    assert not has_former_writers([job, a_pod()], UID)
    assert has_former_writers([a_pod()], UID)
    assert not has_former_writers([a_pod(phase="Failed")], UID)
    assert has_former_writers([a_job(deleting=True)], UID)


def test_progress_is_read_where_the_pod_listens():
    assert progress_url([a_pod()]) == "http://10.0.0.1:8080/progress"
    assert progress_url([a_pod(phase="Pending"), a_pod("q", podIP="")]) is None


def test_directories_in_use_are_those_that_workers_mount():
    def workload(name, claim, place):
        mounts = [{"name": "model", "mountPath": "/models", "subPath": place}]
        volumes = [{"name": "model", "persistentVolumeClaim": {"claimName": claim}}]
        pod = {"containers": [{"name": "worker", "volumeMounts": mounts}], "volumes": volumes}
        return an_object(DEPLOYMENT, name, spec={"template": {"spec": pod}})

    workloads = [workload("a", "qwen", "x/1"), workload("b", "other", "x/2"), workload("c", "qwen", "x/3")]
    assert directories_in_use(workloads, "qwen") == {"x/1", "x/3"}


def test_pod_that_outlives_its_template_uses_its_directory():
    mounts = [{"name": "model", "mountPath": "/models", "subPath": "x/1"}, {"name": "tmp", "mountPath": "/tmp"}]
    volumes = [{"name": "model", "persistentVolumeClaim": {"claimName": "qwen"}}, {"name": "tmp", "emptyDir": {}}]
    spec = {"containers": [{"name": "gateway", "volumeMounts": mounts}], "volumes": volumes}
    running = an_object(POD, "p", spec=spec, status={"phase": "Running"})
    store = a_store(running)
    assert directories_in_use(store.workloads(running.namespace), "qwen") == {"x/1"}
    assert running.body["spec"] == {
        "containers": [{"name": "gateway", "volumeMounts": mounts[:1]}],
        "volumes": volumes[:1],
    }
    ended = an_object(POD, "p", spec=spec, status={"phase": "Failed"})
    assert directories_in_use([ended], "qwen") == frozenset()


def test_service_gets_the_newest_whole_commit():
    status = {"claimName": "qwen", "path": f"tandem-cache/qwen/{COMMIT}", "commit": COMMIT}
    service = a_user()
    assert cache_of(a_store(service), service).exists is False
    assert cache_of(a_store(service, a_cache()), service).claim is None
    claim = cache_of(a_store(service, a_cache(status=status)), service).claim
    assert (claim.claim_name, claim.path) == ("qwen", status["path"])
    assert cache_of(a_store(a_service()), a_service()) is None


def test_model_gateway_pods_use_the_commit_of_their_models_file():
    """They mount the whole claim, so that no template names the directory."""
    one = behind(model={"cacheRef": {"name": "qwen"}}, gateway={"tokenizer": "model"})
    front = gateway_of({"claims": ["qwen", "qwen-2"]})
    manifest = next(each for each in plan_of(front, one).apply if each["kind"] == "ConfigMap")
    labels = {"labels": manifest["metadata"]["labels"]}
    store = a_store(an_object(CONFIG_MAP, manifest["metadata"]["name"], metadata=labels, data=manifest["data"]))
    assert directories_of_gateways(store.model_files("models"), "qwen") == {one.service.spec.model.claim.path}
    assert directories_of_gateways(store.model_files("models"), "qwen-2") == frozenset()
    assert directories_of_gateways(store.model_files("other"), "qwen") == frozenset()


def workers_of(service, commit, revision, created):
    """Deployments of workers as the operator writes them for a commit, known to the store."""
    claim = ClaimSource(claim_name="qwen", path=f"tandem-cache/qwen/{commit}")
    wanted = served("chat", "models", spec_of(service), OperatorSettings(), cache=claim)
    written = [workers(wanted, role, revision, 1, standby=True) for role in ("prefill", "decode")]
    return [
        an_object(
            DEPLOYMENT,
            one["metadata"]["name"],
            owner=service.uid,
            metadata={"labels": one["metadata"]["labels"], "creationTimestamp": created},
            spec=one["spec"],
        )
        for one in written
    ]


def test_commit_of_workers_is_known_without_the_cache():
    service = a_user()
    old = workers_of(service, "b" * 40, "r1", "2026-01-01T00:00:00Z")
    new = workers_of(service, COMMIT, "r2", "2026-01-02T00:00:00Z")
    seen = cache_of(a_store(service, *old, *new), service)
    assert (seen.exists, seen.claim, seen.mounted.path) == (False, None, f"tandem-cache/qwen/{COMMIT}")
    # A rollout back: those of the revision that the spec has now.
    back = an_object(MODEL_SERVICE, "chat", spec=service.body["spec"], status={"revision": "r1"})
    assert cache_of(a_store(back, *old, *new), back).mounted.path == f"tandem-cache/qwen/{'b' * 40}"
    other = an_object(MODEL_SERVICE, "chat", spec=service.body["spec"], metadata={"uid": "another"})
    assert cache_of(a_store(other, *old, *new), other).mounted is None


def test_cache_that_is_being_deleted_offers_no_commit():
    status = {"claimName": "qwen", "path": f"tandem-cache/qwen/{COMMIT}", "commit": COMMIT}
    leaving = a_cache(status=status, metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})
    seen = cache_of(a_store(leaving, a_user()), a_user())
    assert (seen.claim, seen.reason, seen.message) == (None, "CacheMissing", "it is being deleted")


class Server:
    """Answers writes as an API server does; remembers them."""

    def __init__(self):
        self.store, self.applied, self.deleted, self.statuses, self.events = None, [], [], [], []
        self.secrets = frozenset()

    async def get(self, ref, namespace):
        return None

    async def apply(self, manifest, *, subresource="", dry_run=False):
        if subresource:
            self.statuses.append(manifest["status"])
            return a_cache(status=manifest["status"]).body
        if not dry_run:
            self.applied.append(manifest["kind"])
        metadata = {"uid": f"uid-{manifest['kind']}-{manifest['metadata']['name']}", "resourceVersion": "9999"}
        return {**manifest, "metadata": {**manifest["metadata"], **metadata}}

    async def delete(self, ref, namespace, uid, *, dry_run=False):
        if not dry_run:
            self.deleted.append((ref.name, len(self.statuses)))
        return True

    async def existing(self, namespace, names):
        return self.secrets & frozenset(names)

    async def post(self, about, event):
        self.events.append((event.kind, event.reason))


def reconciler(server, store, progress=ProgressReading):
    applier = Applier(server, store, server)
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return CacheReconciler(store, applier, server, server, OperatorSettings(), lambda _: progress(), now=lambda: now)


async def test_new_cache_makes_claim_policy_and_job():
    server, store = Server(), a_store(a_cache())
    result = await reconciler(server, store).reconcile(KEY)
    assert server.applied == ["PersistentVolumeClaim", "NetworkPolicy", "Job"]
    assert (result.wrote, result.again_s) == (True, 60.0)
    assert {one.ref.kind for one in store.parts(KEY)} == {CLAIM.name, "NetworkPolicy", JOB.name}
    server.applied.clear()
    await reconciler(server, store).reconcile(KEY)
    assert "Job" not in server.applied, "a Job that runs is never changed"


async def test_result_is_in_the_status_before_its_job_goes():
    server, store = Server(), a_store(a_cache())
    await reconciler(server, store).reconcile(KEY)
    (job,) = [one for one in store.parts(KEY) if one.ref.kind == JOB.name]
    body = {**job.body, "status": {"conditions": [COMPLETE]}}
    body["metadata"] = {**body["metadata"], "resourceVersion": "10001"}
    store.put(Seen.of(body))
    ended = ending(0, {"commit": COMMIT, "size": 5, "fingerprint": "f" * 64})
    store.put(a_pod(job=job.ref.name, phase="Succeeded", ended=ended))
    await reconciler(server, store).reconcile(KEY)
    ((name, statuses),) = server.deleted
    assert (name, server.statuses[statuses - 1]["commit"]) == (job.ref.name, COMMIT)


async def test_spec_of_another_release_is_reported():
    server, store = Server(), a_store(a_cache(spec={**SPEC, "later": 1}))
    await reconciler(server, store).reconcile(KEY)
    assert (server.applied, server.events) == ([], [("Warning", "InvalidSpec")])


async def test_missing_secret_is_looked_for_again():
    source = {"huggingFace": {"id": "org/mini", "tokenSecret": {"name": "hub", "key": "t"}}}
    server, store = Server(), a_store(a_cache(spec={**SPEC, "source": source}))
    result = await reconciler(server, store).reconcile(KEY)
    assert ("Job" in server.applied, result.again_s) == (False, 60.0)
    server.secrets = frozenset({"hub"})
    await reconciler(server, store).reconcile(KEY)
    assert "Job" in server.applied


def client(answer):
    return httpx.AsyncClient(transport=httpx.MockTransport(lambda _: answer))


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(404),
        httpx.Response(200, text="[]"),
        httpx.Response(200, json={"done": -1}),
        httpx.Response(200, json={"done": 1, "file": "a\x1b"}),
        httpx.Response(200, json={"file": "x" * 256}),
        httpx.Response(200, text='{"more": ' + "[" * 2000 + "]" * 2000 + "}"),
    ],
)
async def test_malformed_download_progress_is_ignored(answer):
    assert await fetch_progress(client(answer), "http://10.0.0.1:8080/progress") is None


async def test_poller_reports_changes_until_the_download_ends():
    store, changed = a_store(a_cache(), a_job(), a_pod()), []
    reading = {"done": 1, "total": 4, "file": "m.safetensors", "rate": 2}
    poller = CachePoller(store, client(httpx.Response(200, json=reading)), leading=lambda: True, changed=changed.append)
    await poller.once()
    await poller.once()
    assert changed == [KEY], "what has not changed is no news"
    assert poller.of(KEY) == ProgressReading(done=1, total=4, file="m.safetensors", rate=2)
    store.put(a_pod(phase="Succeeded", ended=ending(0, "{}")))
    await poller.once()
    assert poller.of(KEY) == ProgressReading()


async def test_status_that_cannot_be_read_is_written_again():
    server, store = Server(), a_store(a_cache(status={"state": "Odd"}))
    await reconciler(server, store).reconcile(KEY)
    assert server.statuses[-1]["claimName"] == "qwen"
    assert ModelCacheStatus().state == "Pending"
