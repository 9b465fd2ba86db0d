"""Services, namespaces and operators deleted in any order: nothing stays, and nothing waits for an operator."""

from collections.abc import Callable

import pytest

from tandem_operator.planning.deletion import FORMER_FINALIZER
from tandem_testing.control_plane import KUBE, PATIENCE_S
from tandem_testing.kube_services import Services
from tandem_testing.operator_process import operator
from tandem_testing.waiting import wait_equal, wait_for

pytestmark = KUBE

HOLD = "fake-kubelet/hold"
SLOW_GATEWAY = {"gateway": {"pod": {"annotations": {HOLD: "true"}}}}
"""Its pods take as long to end as a test lets them."""


def end(services: Services) -> None:
    """The gateway pods that are there have drained."""
    for pod in services.pods("gateway"):
        path = f"/api/v1/namespaces/{services.namespace}/pods/{pod['metadata']['name']}"
        answer = services.cluster.merge(path, {"metadata": {"annotations": {HOLD: None}}})
        assert answer.status_code in (200, 404), answer.text


def pods_of(services: Services) -> dict[str, dict[str, bool]]:
    """By component and pod, whether the pod is being deleted."""
    return {part: services.leaving(part) for part in ("gateway", "worker", "redis")}


def draining(services: Services) -> bool:
    """Whether gateways drain. A ReplicaSet whose pods go before itself makes another pod, which goes soon after."""
    gateways = services.leaving("gateway")
    return bool(gateways) and all(gateways.values())


def collected(services: Services) -> bool:
    """Whether garbage collection is done with what the service alone has owned: what is left has other owners."""
    owners = [ref for one in services.owned().values() for ref in one["metadata"].get("ownerReferences", ())]
    return "ModelService" not in {ref["kind"] for ref in owners}


def wait_held(services: Services, before: dict[str, dict[str, bool]]) -> None:
    """Until gateways drain and garbage collection goes no further; workers and Redis are as `before`."""
    wait_for(lambda: draining(services) and collected(services), PATIENCE_S, services.described)
    kept(services, before)


def kept(services: Services, before: dict[str, dict[str, bool]]) -> None:
    """Gateways may drain, workers and Redis stay."""
    now = pods_of(services)
    assert now["gateway"], "no gateway pod is held"
    assert (now["worker"], now["redis"]) == (before["worker"], before["redis"])


def wait_ended(services: Services, condition: Callable[[], bool]) -> None:
    """Until `condition` is true, while all gateway pods drain, also those that come late."""

    def met() -> bool:
        end(services)
        return condition()

    wait_for(met, PATIENCE_S, services.described)


def wait_gone(services: Services) -> None:
    """Until nothing of the service is left; its gateways drain."""
    wait_ended(services, lambda: services.gone() and not services.owned() and not any(pods_of(services).values()))


@pytest.mark.parametrize("operators", [1, 0], ids=["served", "no operator"])
def test_workers_outlive_the_drain_of_gateways(services, running, operators):
    """With and without an operator."""
    services.apply(**SLOW_GATEWAY)
    services.wait_ready()
    before = pods_of(services)
    if not operators:
        assert running.stop() == 0
    services.cluster.api.request("DELETE", services.path(), json={"propagationPolicy": "Background"}).raise_for_status()
    wait_held(services, before)
    assert ("services", "chat-gateway") not in services.owned()
    wait_gone(services)


@pytest.mark.parametrize("operators", [1, 0], ids=["served", "no operator"])
def test_foreground_deletion_leaves_nothing(services, running, operators):
    """The garbage collector then deletes what gateway pods own together with them: the drain order is not kept."""
    services.apply(**SLOW_GATEWAY)
    services.wait_ready()
    if not operators:
        assert running.stop() == 0
    services.cluster.api.request("DELETE", services.path(), json={"propagationPolicy": "Foreground"}).raise_for_status()
    wait_for(lambda: draining(services), PATIENCE_S, services.described)
    wait_gone(services)


def test_gateways_that_never_end_hold_workers_for_a_bound(services, running):
    services.apply(**SLOW_GATEWAY, drainSeconds=1)
    services.wait_ready()
    services.delete()
    wait_for(
        lambda: not services.pods("worker") and not services.pods("redis"),
        PATIENCE_S,
        lambda: services.described() + running.log(),
    )
    assert draining(services), services.described()
    services.wait_event("Warning", "DrainTimedOut", "chat-decode")
    wait_gone(services)


def test_service_recreated_during_deletion_becomes_ready_later(services, running):
    services.apply(**SLOW_GATEWAY)
    services.wait_ready()
    before = pods_of(services)
    services.delete()
    wait_held(services, before)
    services.apply()
    services.wait_condition("Ready", "False", "NameTaken")
    kept(services, before)
    wait_ended(services, services.is_settled)


def test_gateways_that_are_exchanged_hold_the_pools(services, running):
    """Pools name the gateway pods that are there now: else the first deletion after a rollout would hold nothing."""
    services.apply()
    services.wait_ready()
    (former,) = services.leaving("gateway")
    services.apply(**SLOW_GATEWAY)

    def exchanged() -> bool:
        pools = [services.cluster.get(services.pool_path(role)) for role in ("prefill", "decode")]
        owners = [
            {one["name"] for one in pool["metadata"]["ownerReferences"] if one["kind"] == "Pod"} for pool in pools
        ]
        gateways = set(services.leaving("gateway"))
        return former not in gateways and owners == [gateways, gateways]

    # The service is ready all the time, with the former pod and with the new one.
    wait_for(exchanged, PATIENCE_S, lambda: services.described() + running.log())
    before = pods_of(services)
    services.delete()
    wait_held(services, before)
    wait_gone(services)


def namespace_gone(services: Services) -> bool:
    return services.cluster.api.get(f"/api/v1/namespaces/{services.namespace}").status_code == 404


@pytest.mark.parametrize("operators", [1, 0], ids=["served", "no operator"])
def test_deleted_namespace_goes_with_its_services(services, running, operators, control_plane):
    """The Role of the operator goes first: the service waited for a finalizer that no one could take off any more."""
    services.apply()
    services.wait_ready()
    if not operators:
        assert running.stop() == 0
    control_plane.api.delete(f"/api/v1/namespaces/{services.namespace}").raise_for_status()
    wait_for(services.gone, PATIENCE_S, lambda: services.described() + running.log())
    wait_for(lambda: namespace_gone(services), PATIENCE_S, running.log)


def test_service_goes_after_the_operators_release(services, running, operator_account):
    """Without its rights and its process, as `helm uninstall` leaves a cluster."""
    services.apply()
    services.wait_ready()
    assert running.stop() == 0
    operator_account.dismiss(services.namespace)
    services.delete()
    wait_gone(services)


def test_former_finalizer_is_taken_off(services, running):
    services.apply()
    services.wait_ready()
    merge = {"metadata": {"finalizers": [FORMER_FINALIZER, "example.com/theirs"]}}
    services.cluster.merge(services.path(), merge).raise_for_status()
    wait_equal(lambda: services.get()["metadata"]["finalizers"], ["example.com/theirs"], PATIENCE_S, running.log)
    services.cluster.merge(services.path(), {"metadata": {"finalizers": [FORMER_FINALIZER]}}).raise_for_status()
    services.delete()
    wait_for(services.gone, PATIENCE_S, lambda: services.described() + running.log())


def test_lost_namespace_leaves_the_others_served(services, running, operator_account, control_plane, tmp_path):
    """An operator of several namespaces was never ready after a restart when one of them was gone."""
    made = control_plane.api.post("/api/v1/namespaces", json={"metadata": {"generateName": "lost-"}})
    lost = made.raise_for_status().json()["metadata"]["name"]
    assert running.stop() == 0
    flags = ("--namespaces", f"{lost},{services.namespace}", "--no-leader-elect")
    kubeconfig = operator_account.kubeconfig(tmp_path / "both")
    with operator(kubeconfig, tmp_path / "both.log", *flags) as both:
        services.apply()
        services.wait_ready()
        others = Services(control_plane, lost)
        others.apply()
        operator_account.admit(lost)
        others.wait_ready()
        assert both.stop() == 0
    control_plane.api.delete(f"/api/v1/namespaces/{lost}").raise_for_status()
