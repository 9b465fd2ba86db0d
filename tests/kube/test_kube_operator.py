"""The operator against a real API server: a ModelService's life from `kubectl apply` to its deletion."""

from itertools import pairwise
from typing import Any

import pytest

from tandem_operator.builders.worker import GRACE_AFTER_DRAIN_S, STAY_S
from tandem_services.cli.main import main
from tandem_testing.control_plane import KUBE, PATIENCE_S
from tandem_testing.waiting import wait_equal, wait_for

pytestmark = KUBE

OTHER_MODEL = {"model": {"path": "/opt/tandem/models/tandem-mini-eagle"}}


def test_service_comes_up_stays_quiet_and_goes(services, running):
    services.apply()
    services.wait_ready()
    body = services.get()
    assert body["status"]["ready"] == "1/1P 1/1D"
    assert body["status"]["endpoint"] == f"http://chat-gateway.{services.namespace}.svc"
    assert "finalizers" not in body["metadata"]
    owned = services.owned()
    assert len(owned) == 15
    for (plural, name), one in owned.items():
        (owner,) = [ref for ref in one["metadata"]["ownerReferences"] if ref["kind"] == "ModelService"]
        assert (owner["uid"], owner["controller"]) == (body["metadata"]["uid"], True), (plural, name)
    pool = services.cluster.get(services.pool_path("decode"))
    assert pool["status"]["readyReplicas"] == 1
    assert "tandem.dev/role=decode" in pool["status"]["selector"]

    quiet(services, running)

    services.delete()
    wait_for(lambda: services.gone() and not services.owned(), PATIENCE_S, services.described)
    assert running.stop() == 0


def quiet(services, running):
    """Looks that change nothing write nothing. How long they take is benchmarks/operator_scale.py's."""
    before = {key: written_by_us(one) for key, one in services.owned().items()}
    writes = running.metric("tandem_operator_api_writes_total")
    unchanged = 'tandem_operator_reconciles_total{result="unchanged"}'
    looks = running.metric(unchanged)
    for count in range(5):
        # An annotation is nothing to the operator, but an event of the service's own object.
        services.cluster.merge(services.path(), {"metadata": {"annotations": {"seen": str(count)}}}).raise_for_status()
        wait_for(lambda count=count: running.metric(unchanged) > looks + count, PATIENCE_S, running.log)
    assert running.metric("tandem_operator_api_writes_total") == writes
    assert {key: written_by_us(one) for key, one in services.owned().items()} == before


def written_by_us(found: dict[str, Any]) -> dict[str, Any]:
    """Controllers of Kubernetes write their statuses of it later than the operator finds all pods ready."""
    theirs = ("managedFields", "resourceVersion")
    metadata = {key: value for key, value in found["metadata"].items() if key not in theirs}
    return {**found, "metadata": metadata, "status": None}


def test_another_model_rolls_out_pair_by_pair_and_comes_back(services, running):
    services.apply(prefill={"replicas": 2}, decode={"replicas": 2})
    services.wait_ready()
    (first,) = services.workers("decode")
    services.apply(prefill={"replicas": 2}, decode={"replicas": 2}, **OTHER_MODEL)
    services.wait_ready()
    second = services.wait_one_revision()
    assert services.workers("prefill") == {second: 2}
    wait_equal(lambda: services.get()["status"]["history"], [first], PATIENCE_S)
    services.wait_event("Normal", "RollingOut")
    services.apply(prefill={"replicas": 2}, decode={"replicas": 2})
    services.wait_ready()
    wait_equal(lambda: services.workers("decode"), {first: 2}, PATIENCE_S)


def test_paused_rollout_exchanges_no_pod_and_scales(services, running):
    """As `kubectl rollout pause` does it, within a revision too."""
    services.apply()
    services.wait_ready()
    before = {one["metadata"]["uid"] for one in services.pods("worker") + services.pods("gateway")}
    changed = {"observability": {"logLevel": "debug"}, "drainSeconds": 45}
    services.apply(rollout={"paused": True}, **changed)
    services.wait_condition("Progressing", "False", "Paused")
    wait_equal(
        lambda: {name: one["spec"].get("paused") for name, one in services.deployments().items()},
        dict.fromkeys(services.deployments(), True),
        PATIENCE_S,
        running.log,
    )
    services.apply(rollout={"paused": True}, decode={"replicas": 3}, **changed)
    wait_equal(lambda: len(services.pods("worker")), 4, PATIENCE_S, running.log)
    services.wait_condition("Ready", "True", "CanaryPassed")
    # Those that came are like those that are there.
    beyond = STAY_S + GRACE_AFTER_DRAIN_S
    assert {one["spec"]["terminationGracePeriodSeconds"] for one in services.pods("worker")} == {60 + beyond}
    assert before <= {one["metadata"]["uid"] for one in services.pods("worker") + services.pods("gateway")}
    # Nor is another revision begun.
    services.apply(rollout={"paused": True}, decode={"replicas": 3}, **changed, **OTHER_MODEL)
    wait_equal(lambda: len(services.workers("decode")), 2, PATIENCE_S, running.log)
    assert sorted(services.workers("decode").values()) == [0, 3]
    services.apply(decode={"replicas": 3}, **changed)
    services.wait_ready()

    def graces() -> set[int]:
        there = [one for one in services.pods("worker") if "deletionTimestamp" not in one["metadata"]]
        return {one["spec"]["terminationGracePeriodSeconds"] for one in there}

    wait_equal(graces, {45 + beyond}, PATIENCE_S, running.log)


def test_engine_args_are_accepted_when_a_pod_checked_them(services, running):
    """Before that nothing is known of them, whatever the operator knows of the flag."""
    engine = {"engine": {"args": ["--watermark=0.02"]}}
    services.apply(**engine, decode={"pod": {"annotations": {"fake-kubelet/ready": "false"}}})
    services.wait_condition("ArgumentsAccepted", "Unknown", "NotChecked")
    wait_equal(lambda: len(services.pods("worker")), 2, PATIENCE_S, services.described)
    services.apply(**engine)
    services.wait_ready()
    services.wait_condition("ArgumentsAccepted", "True", "Accepted")


def test_refused_engine_args_leave_serving_pods_alone(services, running, capsys):  # [args-checked-first]
    """The init container of the pods to come says what the parser of their image says of the words."""
    services.apply()
    services.wait_ready()
    serving = uids(services)
    unready = {"pod": {"annotations": {"fake-kubelet/ready": "false"}}}
    services.apply(engine={"args": ["--watermark=many"]}, prefill=unready, decode=unready)
    wait_equal(lambda: len(uids(services) - serving), 2, PATIENCE_S, services.described)
    for pod in services.pods("worker"):
        if pod["metadata"]["uid"] not in serving:
            check = pod["spec"]["initContainers"][0]
            with pytest.raises(SystemExit) as ended:
                main([*check["command"][1:], *check["args"]])
            failed = {"exitCode": ended.value.code, "reason": "Error", "message": capsys.readouterr().err}
            services.fail_init(pod, check, failed)
    services.wait_condition("ArgumentsAccepted", "False", "ArgumentRefused")
    (refused,) = [one for one in services.get()["status"]["conditions"] if one["type"] == "ArgumentsAccepted"]
    assert "argument --watermark" in refused["message"]
    services.wait_event("Warning", "ArgumentRefused")
    assert services.condition("Ready")[0] == "True"
    assert not any(services.leaving("worker").values())
    services.apply()
    services.wait_ready()
    wait_equal(lambda: uids(services), serving, PATIENCE_S, services.described)


def uids(services) -> set[str]:
    return {one["metadata"]["uid"] for one in services.pods("worker")}


def test_invalid_spec_is_reported_and_changes_nothing(services, running):
    services.apply()
    services.wait_ready()
    before = {name: one["metadata"]["generation"] for name, one in services.deployments().items()}
    services.apply(aliases=["chat"], engine={"dtype": "bfloat16"})
    services.wait_condition("Ready", "False", "InvalidSpec")
    assert {name: one["metadata"]["generation"] for name, one in services.deployments().items()} == before
    services.wait_event("Warning", "InvalidSpec")
    services.apply()
    services.wait_ready()


def test_edited_or_deleted_objects_are_restored(services, running):
    """[edits-restored]"""
    services.apply()
    services.wait_ready()
    api, namespace = services.cluster.api, services.namespace
    gateway = f"/apis/apps/v1/namespaces/{namespace}/deployments/chat-gateway"
    services.cluster.merge(gateway, {"spec": {"replicas": 3}}).raise_for_status()
    wait_equal(lambda: services.cluster.get(gateway)["spec"]["replicas"], 1, PATIENCE_S)
    front = f"/api/v1/namespaces/{namespace}/services/chat-gateway"
    uid = services.cluster.get(front)["metadata"]["uid"]
    api.delete(front).raise_for_status()

    def made_again():
        answer = api.get(front)
        return answer.status_code == 200 and answer.json()["metadata"]["uid"] != uid

    wait_for(made_again, PATIENCE_S, lambda: api.get(front).text + running.log())
    # Taking our label off hides the object from watches; it comes back under it.
    services.cluster.merge(front, {"metadata": {"labels": {"tandem.dev/service": None}}}).raise_for_status()
    wait_for(
        lambda: "tandem.dev/service" in services.cluster.get(front)["metadata"]["labels"],
        PATIENCE_S,
        lambda: api.get(front).text + running.log(),
    )


def test_objects_of_others_are_left_alone_and_named(services, running):
    """[owner-only]"""
    path = f"/api/v1/namespaces/{services.namespace}/services"
    theirs = {"metadata": {"name": "chat-gateway"}, "spec": {"ports": [{"port": 1, "protocol": "TCP"}]}}
    made = services.cluster.api.post(path, json=theirs).raise_for_status().json()
    services.apply()
    services.wait_condition("Ready", "False", "NameTaken")
    assert (
        services.cluster.get(f"{path}/chat-gateway")["metadata"]["resourceVersion"]
        == made["metadata"]["resourceVersion"]
    )
    assert services.deployments() == {}
    services.cluster.api.delete(f"{path}/chat-gateway").raise_for_status()
    services.wait_ready()


def test_admission_rejection_sets_degraded_until_accepted(services, running):
    """The API server's own words, and nothing else stops [specs-refused]."""
    quotas = f"/api/v1/namespaces/{services.namespace}/resourcequotas"
    quota = {"metadata": {"name": "one"}, "spec": {"hard": {"services": "1"}}}
    services.cluster.api.post(quotas, json=quota).raise_for_status()
    wait_equal(lambda: services.cluster.get(f"{quotas}/one")["status"].get("hard"), {"services": "1"}, PATIENCE_S)
    services.apply()
    services.wait_condition("Degraded", "True", "ApplyRefused")
    services.wait_event("Warning", "ApplyRefused")
    services.cluster.api.delete(f"{quotas}/one").raise_for_status()
    services.wait_ready()
    services.wait_condition("Degraded", "False", "AllWell")


def test_pool_is_scaled_from_outside_in_mode_external(services, running):
    services.apply(autoscaling={"mode": "external"})
    services.wait_ready()
    path = services.pool_path("decode")
    services.cluster.merge(f"{path}/scale", {"spec": {"replicas": 3}}).raise_for_status()
    wait_equal(lambda: list(services.workers("decode").values()), [3], PATIENCE_S, running.log)
    services.wait_ready()
    wait_equal(lambda: services.cluster.get(f"{path}/scale")["status"]["replicas"], 3, PATIENCE_S)
    # An edit of the spec leaves the number to its owner.
    services.apply(autoscaling={"mode": "external"}, observability={"logLevel": "debug"})
    services.wait_ready()
    assert services.cluster.get(path)["spec"]["replicas"] == 3


def test_in_mode_none_the_spec_wins(services, running):
    services.apply()
    services.wait_ready()
    path = services.pool_path("prefill")
    services.cluster.merge(f"{path}/scale", {"spec": {"replicas": 4}}).raise_for_status()
    wait_equal(lambda: services.cluster.get(path)["spec"]["replicas"], 1, PATIENCE_S)
    services.apply(prefill={"replicas": 2})
    wait_equal(lambda: services.cluster.get(path)["spec"]["replicas"], 2, PATIENCE_S)
    services.wait_ready()


def test_autoscaler_without_metrics_holds_with_an_event(services, running):
    """Pods without containers tell nothing; nothing is scaled, least of all to zero [figures-or-hold]."""
    bounds = {"scaling": {"minReplicas": 0, "maxReplicas": 3}}
    scaling = {"mode": "internal", "periodSeconds": 0.5, "idleSecondsToZero": 0.1}
    services.apply(autoscaling=scaling, prefill=bounds, decode=bounds)
    services.wait_condition("AutoscalingActive", "False", "MetricsUnavailable")
    services.wait_ready()
    decisions = services.get()["status"]["decisions"]
    assert {decision["action"] for decision in decisions} == {"hold"}
    # Each reason once: pods may become ready one after the other, and another one is then named.
    reasons = [decision["reason"] for decision in decisions]
    assert all(first != second for first, second in pairwise(reasons))
    assert services.cluster.get(services.pool_path("decode"))["spec"]["replicas"] == 1
    services.wait_event("Warning", "ScalingHeld")


def test_secret_that_comes_later_heals(services, running):
    """[absent-object-heals]"""
    services.apply(gateway={"authSecret": "api-keys"})
    services.wait_condition("Ready", "False", "SecretMissing")
    path = f"/api/v1/namespaces/{services.namespace}/secrets"
    services.cluster.api.post(path, json={"metadata": {"name": "api-keys"}}).raise_for_status()
    services.wait_ready()
