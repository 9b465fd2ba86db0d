"""What happens to operators, and to the API server, while services are served, and the way back."""

import random
from contextlib import ExitStack

import pytest

from tandem_testing.control_plane import KUBE, PATIENCE_S, ControlPlane
from tandem_testing.operator_process import operator
from tandem_testing.waiting import wait_equal, wait_for

pytestmark = KUBE

OTHER_MODEL = {"model": {"path": "/opt/tandem/models/tandem-mini-eagle"}}
LEASE = ("--lease-duration", "150", "--renew-deadline", "120", "--retry-period", "0.5")
"""No pause of a process of this machine loses it."""


@pytest.fixture
def start(operator_kubeconfig, namespace, tmp_path):
    """Operators of this namespace; those that still run are ended."""
    with ExitStack() as running:

        def start_one(name, *flags):
            log = tmp_path / f"{name}.log"
            words = ("--namespaces", namespace, "--operator-namespace", namespace, *flags)
            return running.enter_context(operator(operator_kubeconfig, log, *words))

        yield start_one


def expire(cluster: ControlPlane, namespace: str) -> None:
    """The lease of a leader that has died, whose time would be longer than a test is."""
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/tandem-operator"
    cluster.merge(path, {"spec": {"leaseDurationSeconds": 1}}).raise_for_status()


def test_standby_operator_takes_over_when_leader_dies(services, start, control_plane):
    """No double create, and everything converges under the new leader [one-leader]."""
    first = start("first", *LEASE)
    wait_for(lambda: first.leading, PATIENCE_S, first.log)
    second = start("second", *LEASE)
    services.apply()
    services.wait_ready()
    writes = "tandem_operator_api_writes_total"
    assert second.metric(writes) == 0
    assert not second.leading
    before = services.owned()
    services.apply(decode={"replicas": 2})
    first.kill()
    expire(control_plane, services.namespace)
    wait_for(lambda: second.leading, PATIENCE_S, second.log)
    services.wait_ready()
    assert list(services.workers("decode").values()) == [2]
    after = services.owned()
    assert {key: one["metadata"]["uid"] for key, one in after.items()} == {
        key: one["metadata"]["uid"] for key, one in before.items()
    }


def test_leader_that_ends_hands_over_at_once(services, start):
    first = start("first", *LEASE)
    wait_for(lambda: first.leading, PATIENCE_S, first.log)
    second = start("second", *LEASE)
    services.apply()
    services.wait_ready()
    assert first.stop() == 0
    wait_for(lambda: second.leading, PATIENCE_S, second.log)
    assert "released the lease" in first.log()
    services.apply(prefill={"replicas": 2})
    services.wait_ready()


def test_restarted_operator_continues_a_rollout(services, start):
    """Neither does the old revision grow back, nor does anything go that still serves."""
    two = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}}
    first = start("first", "--no-leader-elect")
    services.apply(**two)
    services.wait_ready()
    (old,) = services.workers("decode")
    never = {"annotations": {"fake-kubelet/ready": "false"}}
    held = {role: {**part, "pod": never} for role, part in two.items()}
    services.apply(**held, **OTHER_MODEL)
    # The first pair of the new revision is there and not ready.
    wait_equal(lambda: len(services.workers("decode")), 2, PATIENCE_S, lambda: str(services.workers("decode")))
    first.kill()
    assert services.workers("decode")[old] == 2
    second = start("second", "--no-leader-elect")
    looks = "tandem_operator_reconciles_total"
    wait_for(lambda: second.metric(looks) > 0, PATIENCE_S, second.log)
    assert services.workers("decode")[old] == 2
    assert sum(services.workers("decode").values()) == 3
    services.apply(**two, **OTHER_MODEL)
    services.wait_ready()
    assert services.wait_one_revision() != old
    assert list(services.workers("prefill").values()) == [2]


@pytest.mark.parametrize("seed", [1, 2])
def test_rapid_edits_and_reverts_converge(services, start, seed):
    """Whatever was asked for in between, and however far it had come: in the end there is what was asked for last."""
    start("operator", "--no-leader-elect")
    choice = random.Random(seed)
    models = [{}, OTHER_MODEL, {"engine": {"pageSize": 16}}]
    wanted = (1, 1, models[0])
    for _ in range(12):
        wanted = (choice.randint(0, 3), choice.randint(1, 3), choice.choice(models))
        prefill, decode, more = wanted
        services.apply(prefill={"replicas": prefill}, decode={"replicas": decode}, **more)
        steps = choice.randint(0, 3)
        generation = services.get()["metadata"]["generation"]
        if steps:
            wait_for(
                lambda least=generation - steps + 1: (
                    services.get().get("status", {}).get("observedGeneration", 0) >= least
                ),
                PATIENCE_S,
                services.described,
            )
    prefill, decode, more = wanted
    services.apply(prefill={"replicas": 1}, decode={"replicas": decode}, **more)
    services.wait_ready()
    services.wait_one_revision()
    assert list(services.workers("decode").values()) == [decode]
    assert list(services.workers("prefill").values()) == [1]
