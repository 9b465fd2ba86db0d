"""Plans: what is made of a spec, that a plan carried out changes nothing more, and the status until then."""

from dataclasses import replace
from typing import Any

import pytest

from tandem_operator.api.model_service import Decision, ModelServiceStatus
from tandem_operator.planning.observed import Canary, Ref
from tandem_operator.planning.plan import make_plan
from tandem_operator.planning.status import not_applied
from tandem_operator.planning.validation import problems_of
from tandem_operator.settings import ClusterApis, OperatorSettings
from tandem_operator.telemetry.autoscaler import scaling_config
from tandem_testing.kube_cluster import MINIMAL, KubeCluster, service_of


def conditions(cluster: KubeCluster) -> dict[str, tuple[str, str]]:
    return {one.type: (one.status, one.reason) for one in cluster.status.conditions}


def kinds(cluster: KubeCluster) -> set[tuple[str, str]]:
    return {(ref.kind, ref.name) for ref in cluster.objects}


def replicas(cluster: KubeCluster) -> dict[str, int]:
    return {one.name: one.replicas for one in cluster.deployments.values() if one.role}


def test_minimal_service_plans_pools_gateway_redis_and_budgets():
    cluster = KubeCluster()
    cluster.reconcile(service_of())
    revision = cluster.status.revision
    assert kinds(cluster) == {
        ("WorkerPool", "chat-prefill"),
        ("WorkerPool", "chat-decode"),
        ("Deployment", f"chat-prefill-{revision}"),
        ("Deployment", f"chat-decode-{revision}"),
        ("Deployment", "chat-gateway"),
        ("Service", "chat-gateway"),
        ("Deployment", "chat-redis"),
        ("Service", "chat-redis"),
        ("PodDisruptionBudget", f"chat-prefill-{revision}"),
        ("PodDisruptionBudget", f"chat-decode-{revision}"),
        ("NetworkPolicy", "chat-gateway"),
        ("NetworkPolicy", "chat-worker"),
        ("NetworkPolicy", "chat-redis"),
    }
    assert cluster.secrets == {"chat-curve", "chat-redis"}


@pytest.mark.parametrize("mode", ["none", "internal", "external"])
def test_plan_that_was_carried_out_changes_nothing_more(mode):
    cluster, service = KubeCluster(), service_of(autoscaling={"mode": mode})
    cluster.settle(service)
    plan = cluster.plan(service)
    assert (plan.secrets, plan.scale, plan.delete) == ((), (), ())
    assert plan.status == cluster.status
    assert conditions(cluster)["Ready"] == ("True", "CanaryPassed")
    assert cluster.status.ready == "1/1P 1/1D"
    assert cluster.status.endpoint == "http://chat-gateway.models.svc"


def test_ready_names_missing_parts_in_order_of_importance():
    cluster, service = KubeCluster(), service_of()
    cluster.reconcile(service)
    cluster.reconcile(service)
    assert conditions(cluster)["Ready"] == ("False", "Starting")
    assert next(one for one in cluster.status.conditions if one.type == "Ready").message.startswith("RedisReady")
    cluster.start_everything()
    cluster.canaries[""] = Canary(passed=False, message="502 from the gateway")
    cluster.reconcile(service)
    assert conditions(cluster)["Ready"] == ("False", "CanaryFailed")


def test_invalid_spec_changes_nothing_and_reports_why():
    cluster = KubeCluster()
    cluster.settle(service_of())
    before = dict(cluster.objects)
    bad = service_of(
        {**MINIMAL, "engine": {"tensorParallelSize": 3}, "prefill": {"resources": {"limits": {"nvidia.com/gpu": 2}}}}
    )
    plan = cluster.reconcile(bad)
    assert (plan.apply, plan.scale, plan.delete) == ((), (), ())
    assert cluster.objects == before
    assert conditions(cluster)["Ready"] == ("False", "InvalidSpec")
    assert "spec.prefill: tensorParallelSize 3 with 2 GPUs" in plan.status.conditions[0].message
    assert conditions(cluster)["DecodeWorkersReady"] == ("True", "AllReady")


SIXTEEN = {**MINIMAL, "engine": {"tensorParallelSize": 16}}
GROUPS = ClusterApis(leader_worker_sets=True)


def eight_gpus(**engine: int) -> dict[str, Any]:
    return {"resources": {"limits": {"nvidia.com/gpu": 8}}, "engine": engine}


def test_worker_group_without_its_api_is_rejected():
    service = service_of({**SIXTEEN, "prefill": eight_gpus(), "decode": eight_gpus()})
    (text, *_) = problems_of(service, ClusterApis())
    assert "tensorParallelSize 16 over 2 pods of 8 ranks needs the LeaderWorkerSet API" in text
    assert "set tensorParallelSize to 8" in text
    assert problems_of(service, GROUPS) == []


def test_name_that_the_pods_of_groups_could_not_have_is_refused():
    groups = {**SIXTEEN, "prefill": eight_gpus(), "decode": eight_gpus()}
    assert problems_of(service_of(groups, name="n" * 32), GROUPS) == []
    (text, *_) = problems_of(service_of(groups, name="n" * 33), GROUPS)
    assert "has 33 characters; with workers of 2 pods it may have 32" in text


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (eight_gpus(nodes=3), "engine.nodes 3 does not divide tensorParallelSize 16"),
        (eight_gpus(nodes=4), "tensorParallelSize 16 with 8 GPUs in resources.limits and engine.nodes 4"),
        (eight_gpus(tensorParallelSize=12), "give each pod 12, or set tensorParallelSize to 8"),
    ],
)
def test_ranks_that_pods_cannot_share_are_refused(part, message):
    (text,) = problems_of(service_of({**SIXTEEN, "prefill": part, "decode": eight_gpus()}), GROUPS)
    assert message in text


def test_groups_scale_roll_and_pause_as_other_workers_do():
    settings = OperatorSettings(apis=GROUPS)
    cluster = KubeCluster(settings=settings)
    two = {"engine": {"tensorParallelSize": 2, "nodes": 2}}
    cluster.settle(service_of(decode={**two, "replicas": 3}))
    first = cluster.status.revision
    kinds = {ref.name: ref.kind for ref in cluster.objects if ref.kind in ("Deployment", "LeaderWorkerSet")}
    assert (kinds[f"chat-decode-{first}"], kinds[f"chat-prefill-{first}"]) == ("LeaderWorkerSet", "Deployment")
    plan = cluster.reconcile(service_of(decode={**two, "replicas": 3}, rollout={"paused": True}))
    (group,) = [one for one in plan.apply if one["kind"] == "LeaderWorkerSet"]
    assert group["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]["partition"] == 3
    # Workers of one pod are objects of another kind, so they are another revision.
    cluster.settle(service_of(decode={"replicas": 3}))
    second = cluster.status.revision
    assert second != first
    assert replicas(cluster) == {f"chat-prefill-{second}": 1, f"chat-decode-{second}": 3}
    assert not [ref for ref in cluster.objects if ref.kind == "LeaderWorkerSet"]


def test_group_costs_the_gpus_of_all_its_pods():
    service = service_of({**SIXTEEN, "prefill": eight_gpus(tensorParallelSize=8), "decode": eight_gpus()})
    config = scaling_config(service)
    assert (config.prefill.gpus, config.decode.gpus) == (8, 16)


def test_changed_weights_make_a_revision_and_replace_the_old():
    cluster = KubeCluster()
    cluster.settle(service_of(decode={"replicas": 3}))
    old = cluster.status.revision
    changed = service_of({"model": {"path": "/models/other"}, "decode": {"replicas": 3}})
    cluster.reconcile(changed)
    new = cluster.status.revision
    assert new != old
    assert replicas(cluster) == {
        f"chat-prefill-{old}": 1,
        f"chat-decode-{old}": 3,
        f"chat-prefill-{new}": 1,
        f"chat-decode-{new}": 1,
    }
    assert conditions(cluster)["Progressing"] == ("True", "RollingOut")
    cluster.settle(changed)
    assert replicas(cluster) == {f"chat-prefill-{new}": 1, f"chat-decode-{new}": 3}
    assert cluster.status.history == [old]


def test_reverted_spec_returns_to_the_former_revision():
    cluster, first = KubeCluster(), service_of()
    cluster.settle(first)
    old = cluster.status.revision
    cluster.reconcile(service_of({"model": {"path": "/models/other"}}))
    cluster.settle(first)
    assert set(replicas(cluster)) == {f"chat-prefill-{old}", f"chat-decode-{old}"}


@pytest.mark.parametrize(
    "change",
    [{"drainSeconds": 30}, {"engine": {"maxRunningRequests": 8}}, {"prefill": {"pod": {"labels": {"team": "a"}}}}],
)
def test_change_without_effect_on_kv_keeps_the_revision(change):
    cluster = KubeCluster()
    cluster.settle(service_of())
    revision = cluster.status.revision
    cluster.settle(service_of(**change))
    assert cluster.status.revision == revision
    assert len(replicas(cluster)) == 2


def test_old_deployment_is_kept_until_its_last_pod_has_drained():
    cluster = KubeCluster()
    cluster.settle(service_of())
    old = f"chat-decode-{cluster.status.revision}"
    changed = service_of({"model": {"path": "/models/other"}})
    ref = Ref(api_version="apps/v1", kind="Deployment", name=old)
    for _ in range(20):
        cluster.start_everything()
        plan = cluster.plan(changed)
        draining = cluster.deployments[old].pods > 0
        assert not (draining and ref in plan.delete)
        if ref in plan.delete:
            return
        cluster.reconcile(changed)
    raise AssertionError("the old Deployment was never taken away")


def test_autoscaling_mode_decides_who_owns_the_number_of_workers():
    fixed, external = (
        service_of(decode={"replicas": 2}),
        service_of(decode={"replicas": 2}, autoscaling={"mode": "external"}),
    )
    cluster = KubeCluster()
    cluster.settle(external)
    assert cluster.pools == {"prefill": 1, "decode": 2}
    cluster.pools["decode"] = 5
    cluster.settle(external)
    assert cluster.pools["decode"] == 5
    assert replicas(cluster)[f"chat-decode-{cluster.status.revision}"] == 5
    cluster.settle(fixed)
    assert cluster.pools["decode"] == 2
    assert replicas(cluster)[f"chat-decode-{cluster.status.revision}"] == 2


def test_autoscalers_number_stays_within_the_bounds_of_the_role():
    service = service_of(autoscaling={"mode": "internal"}, decode={"scaling": {"minReplicas": 2, "maxReplicas": 3}})
    cluster = KubeCluster()
    for wanted, given in ((1, 2), (9, 3), (3, 3)):
        cluster.pools = {"prefill": 1, "decode": wanted}
        cluster.settle(service)
        assert replicas(cluster)[f"chat-decode-{cluster.status.revision}"] == given


def test_objects_of_removed_fields_are_deleted():
    cluster = KubeCluster()
    cluster.settle(service_of(gateway={"replicas": 2}))
    assert ("PodDisruptionBudget", "chat-gateway") in kinds(cluster)
    cluster.settle(
        service_of(redis={"external": {"url": "redis://elsewhere:6379/0"}}, security={"networkPolicies": False})
    )
    left = kinds(cluster)
    assert ("PodDisruptionBudget", "chat-gateway") not in left
    assert not [name for kind, name in left if kind == "NetworkPolicy" or name == "chat-redis"]


def test_referenced_secret_that_is_absent_is_named_and_heals():
    cluster, service = KubeCluster(), service_of(gateway={"authSecret": "api-keys"})
    cluster.settle(service)
    assert conditions(cluster)["ModelAvailable"] == ("False", "SecretMissing")
    cluster.secrets.add("api-keys")
    cluster.settle(service)
    assert conditions(cluster)["Ready"] == ("True", "CanaryPassed")


def test_slow_links_are_a_condition_that_does_not_stop_serving():
    cluster, service = KubeCluster(), service_of(transfer={"expect": "rdma"})
    cluster.links = {"chat-prefill-0 to chat-decode-0": "tcp"}
    cluster.settle(service)
    assert conditions(cluster)["TransportReady"] == ("False", "SlowTransport")
    assert conditions(cluster)["Ready"] == ("True", "CanaryPassed")


def test_times_of_conditions_move_with_their_status_alone():
    cluster, service = KubeCluster(), service_of()
    cluster.settle(service)
    before = {one.type: one.last_transition_time for one in cluster.status.conditions}
    cluster.clock += 600
    cluster.canaries[""] = Canary(passed=False, message="no")
    cluster.reconcile(service)
    after = {one.type: one.last_transition_time for one in cluster.status.conditions}
    assert {kind for kind in after if after[kind] != before[kind]} == {"Ready", "RouterReady"}


def test_scale_to_zero_is_ready_and_reported():
    cluster = KubeCluster()
    cluster.settle(service_of(prefill={"replicas": 0}, decode={"replicas": 0}))
    assert conditions(cluster)["Ready"][0] == "True"
    assert conditions(cluster)["RouterReady"] == ("True", "ScaledToZero")


def test_taken_names_are_reported_and_nothing_changes():
    cluster, service = KubeCluster(), service_of()
    cluster.settle(service)
    taken = Ref(api_version="v1", kind="Service", name="chat-gateway")
    observed = replace(cluster.observed(), foreign=frozenset({taken}))
    plan = make_plan(service, observed, cluster.status, 1, cluster.settings)
    assert (plan.secrets, plan.apply, plan.scale, plan.delete, plan.pools) == ((), (), (), (), {})
    ready = next(one for one in plan.status.conditions if one.type == "Ready")
    assert (ready.status, ready.reason) == ("False", "NameTaken")
    assert "Service 'chat-gateway'" in ready.message


def test_status_has_decisions_and_hold_reason_of_autoscaler():
    cluster, service = KubeCluster(), service_of(autoscaling={"mode": "internal"})
    cluster.settle(service)
    decision = Decision(time="2026-01-01T00:00:00Z", role="both", action="hold", before=2, after=2, reason="no figures")
    observed = replace(cluster.observed(), decisions=(decision,), holding="no figures")
    status = make_plan(service, observed, cluster.status, 1, cluster.settings).status
    assert status.decisions == [decision]
    active = next(one for one in status.conditions if one.type == "AutoscalingActive")
    assert (active.status, active.reason) == ("False", "MetricsUnavailable")
    later = make_plan(service, cluster.observed(), status, 1, cluster.settings).status
    assert later.decisions == [decision]


def test_rejected_object_is_reported_without_ending_readiness():
    cluster, service = KubeCluster(), service_of()
    cluster.settle(service)
    reported = ("ApplyRefused", "403 Forbidden: exceeded quota", "2026-01-01T00:00:00Z")
    status = not_applied(cluster.status, cluster.status, *reported)
    found = {one.type: (one.status, one.reason) for one in status.conditions}
    assert found["Degraded"] == ("True", "ApplyRefused")
    assert found["Ready"][0] == "True"


def test_service_that_never_came_up_is_unready_for_the_refusal():
    reported = ("ApplyRefused", "403 Forbidden: exceeded quota", "2026-01-01T00:00:00Z")
    for planned in (ModelServiceStatus(), KubeCluster().plan(service_of()).status):
        status = not_applied(planned, ModelServiceStatus(), *reported)
        found = {one.type: (one.status, one.reason, one.message) for one in status.conditions}
        assert found["Ready"] == ("False", *reported[:2])
        assert found["Degraded"] == ("True", *reported[:2])


def test_counts_and_columns_are_those_of_the_serving_revision():
    """Workers of all revisions were counted, so a rollout that was stuck looked complete."""
    cluster = KubeCluster()
    cluster.settle(service_of(prefill={"replicas": 2}, decode={"replicas": 2}))
    old = cluster.status.revision
    assert (cluster.status.serving, cluster.status.ready, cluster.status.error) == (old, "2/2P 2/2D", "")
    changed = service_of(prefill={"replicas": 2}, decode={"replicas": 2}, model={"path": "/models/other"})
    cluster.reconcile(changed)
    new = next(one.revision for one in cluster.deployments.values() if one.revision not in (None, old))
    cluster.canaries[new] = Canary(passed=False, message="no answer")
    cluster.reconcile(changed)
    status = cluster.status
    assert (status.serving, status.revision, status.ready) == (old, new, "2/2P 2/2D")
    assert status.error == f"CanaryFailed: revision {new}: no answer"
    cluster.settle(changed)
    assert (cluster.status.serving, cluster.status.ready, cluster.status.error) == (new, "2/2P 2/2D", "")


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"model": {"path": "/models/../etc"}}, "spec.model.path"),
        (
            {"model": {"huggingFace": {"id": "a/b", "revision": "main/../../c"}}},
            "spec.model.huggingFace.revision",
        ),
        (
            {"decode": {"engine": {"speculation": {"algorithm": "EAGLE", "draftModelPath": "../eagle"}}}},
            "spec.decode.engine.speculation.draftModelPath",
        ),
        (
            {"engine": {"speculation": {"algorithm": "EAGLE", "draftModelPath": "a/.."}}},
            "spec.engine.speculation.draftModelPath",
        ),
    ],
)
def test_path_that_leaves_its_folder_is_refused(spec, field):
    """Also where the CRD in the cluster is older than the rule."""
    (text,) = problems_of(service_of({**MINIMAL, **spec}), ClusterApis())
    assert text.startswith(f"{field}: ")
    assert "leads out of the folder by '..'" in text
