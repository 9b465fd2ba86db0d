"""Services, namespaces and operators deleted in any order: nothing stays, and nothing waits for an operator."""

import pytest

from tandem_operator.planning.deletion import FORMER_FINALIZER
from tandem_testing.control_plane import KUBE, PATIENCE_S
from tandem_testing.kube_services import Services
from tandem_testing.operator_process import operator
from tandem_testing.waiting import wait_for

pytestmark = KUBE

HOLD = "fake-kubelet/hold"
SLOW_GATEWAY = {"gateway": {"pod": {"annotations": {HOLD: "true"}}}}
"""Its pods take as long to end as a test lets them."""


def end(services: Services) -> None:
    """The gateway pods have drained."""
    for pod in services.pods("gateway"):
        path = f"/api/v1/namespaces/{services.namespace}/pods/{pod['metadata']['name']}"
        answer = services.cluster.merge(path, {"metadata": {"annotations": {HOLD: None}}})
        assert answer.status_code in (200, 404), answer.text


def leaving(services: Services, component: str) -> list[bool]:
    """Of each pod of a component, whether it is being deleted."""
    return ["deletionTimestamp" in one["metadata"] for one in services.pods(component)]


def held(services: Services) -> bool:
    """Whether gateways drain, and workers and Redis are as they were."""
    return (leaving(services, "gateway"), leaving(services, "worker"), leaving(services, "redis")) == (
        [True],
        [False, False],
        [False],
    )


def wait_gone(services: Services) -> None:
    """Until nothing of the service is left."""

    def left() -> list[object]:
        return [*services.owned(), *(services.pods(part) for part in ("gateway", "worker", "redis"))]

    wait_for(lambda: services.gone() and not any(left()), PATIENCE_S, lambda: str(left()))


@pytest.mark.parametrize("operators", [1, 0], ids=["served", "no operator"])
def test_workers_outlive_the_drain_of_gateways(services, running, operators):
    """With and without an operator."""
    services.apply(**SLOW_GATEWAY)
    services.wait_ready()
    if not operators:
        assert running.stop() == 0
    services.cluster.api.request("DELETE", services.path(), json={"propagationPolicy": "Background"}).raise_for_status()
    wait_for(lambda: held(services), PATIENCE_S, lambda: str(services.owned().keys()))
    # Garbage collection is done with what the service alone has owned, and goes no further.
    front = f"/api/v1/namespaces/{services.namespace}/services/chat-gateway"
    wait_for(lambda: services.cluster.api.get(front).status_code == 404, PATIENCE_S)
    assert held(services)
    end(services)
    wait_gone(services)


@pytest.mark.parametrize("operators", [1, 0], ids=["served", "no operator"])
def test_foreground_deletion_leaves_nothing(services, running, operators):
    """The garbage collector then deletes what gateway pods own together with them: the drain order is not kept."""
    services.apply(**SLOW_GATEWAY)
    services.wait_ready()
    if not operators:
        assert running.stop() == 0
    services.cluster.api.request("DELETE", services.path(), json={"propagationPolicy": "Foreground"}).raise_for_status()
    wait_for(lambda: leaving(services, "gateway") == [True], PATIENCE_S, lambda: str(services.owned().keys()))
    end(services)
    wait_gone(services)


def test_gateways_that_never_end_hold_workers_for_a_bound(services, running):
    services.apply(**SLOW_GATEWAY, drainSeconds=1)
    services.wait_ready()
    services.delete()
    wait_for(lambda: not services.pods("worker") and not services.pods("redis"), PATIENCE_S, running.log)
    assert leaving(services, "gateway") == [True]
    services.wait_event("Warning", "DrainTimedOut", "chat-decode")
    end(services)
    wait_gone(services)


def test_a_service_made_again_meanwhile_comes_up_after(services, running):
    services.apply(**SLOW_GATEWAY)
    services.wait_ready()
    services.delete()
    wait_for(lambda: held(services), PATIENCE_S, lambda: str(services.owned().keys()))
    services.apply()
    services.wait_condition("Ready", "False", "NameTaken")
    assert held(services), "the former one is left alone"
    end(services)
    services.wait_ready()


def test_gateways_that_are_exchanged_hold_the_pools(services, running):
    """Pools name the gateway pods that are there now: else the first deletion after a rollout would hold nothing."""
    services.apply()
    services.wait_ready()
    services.apply(**SLOW_GATEWAY)
    services.wait_ready()

    def owners() -> set[str]:
        pool = services.cluster.get(services.pool_path("prefill"))
        return {one["name"] for one in pool["metadata"]["ownerReferences"] if one["kind"] == "Pod"}

    wait_for(lambda: owners() == {one["metadata"]["name"] for one in services.pods("gateway")}, PATIENCE_S, running.log)
    services.delete()
    wait_for(lambda: held(services), PATIENCE_S, lambda: str(services.owned().keys()))
    end(services)
    wait_gone(services)


def namespace_gone(services: Services) -> bool:
    return services.cluster.api.get(f"/api/v1/namespaces/{services.namespace}").status_code == 404


@pytest.mark.parametrize("operators", [1, 0], ids=["served", "no operator"])
def test_a_deleted_namespace_goes_with_its_services(services, running, operators, control_plane):
    """The Role of the operator goes first: the service waited for a finalizer that no one could take off any more."""
    services.apply()
    services.wait_ready()
    if not operators:
        assert running.stop() == 0
    control_plane.api.delete(f"/api/v1/namespaces/{services.namespace}").raise_for_status()
    wait_for(services.gone, PATIENCE_S, running.log)
    wait_for(lambda: namespace_gone(services), PATIENCE_S, running.log)


def test_a_service_goes_after_the_operators_release(services, running, operator_account):
    """Without its rights and its process, as `helm uninstall` leaves a cluster."""
    services.apply()
    services.wait_ready()
    assert running.stop() == 0
    operator_account.dismiss(services.namespace)
    services.delete()
    wait_gone(services)


def test_a_former_finalizer_is_taken_off(services, running):
    services.apply()
    services.wait_ready()
    merge = {"metadata": {"finalizers": [FORMER_FINALIZER, "example.com/theirs"]}}
    services.cluster.merge(services.path(), merge).raise_for_status()
    wait_for(lambda: services.get()["metadata"]["finalizers"] == ["example.com/theirs"], PATIENCE_S, running.log)
    services.cluster.merge(services.path(), {"metadata": {"finalizers": [FORMER_FINALIZER]}}).raise_for_status()
    services.delete()
    wait_for(services.gone, PATIENCE_S, running.log)


def test_a_lost_namespace_leaves_the_others_served(services, running, operator_account, control_plane, tmp_path):
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
