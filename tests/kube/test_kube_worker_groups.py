"""Workers of several pods on a real API server: with the LeaderWorkerSet API, and the condition without it."""

import json
from collections.abc import Iterator

import pytest

from tandem_services.cli.k8s import command
from tandem_testing.control_plane import KUBE, PATIENCE_S, neighbour_apis
from tandem_testing.kube_services import Services
from tandem_testing.leader_worker_sets import LeaderWorkerSets
from tandem_testing.operator_process import OperatorProcess, operator
from tandem_testing.waiting import wait_for

pytestmark = KUBE

TWO_PODS = {"tensorParallelSize": 2, "nodes": 2}


@pytest.fixture
def sets(control_plane, namespace) -> Iterator[LeaderWorkerSets]:
    """With the API there; it goes with the test."""
    with neighbour_apis(control_plane, "LeaderWorkerSet"):
        yield LeaderWorkerSets(control_plane, namespace)


@pytest.fixture
def started(operator_kubeconfig, namespace, tmp_path):
    """Starts an operator, as a context."""
    return lambda: operator(
        operator_kubeconfig, tmp_path / "operator.log", "--namespaces", namespace, "--no-leader-elect"
    )


def test_missing_leaderworkerset_api_sets_invalid_spec(services, started):
    with started() as running:
        services.apply(decode={"engine": TWO_PODS})
        services.wait_condition("Ready", "False", "InvalidSpec")
        conditions = services.get()["status"]["conditions"]
        (message,) = [one["message"] for one in conditions if one["type"] == "Ready"]
        assert "needs the LeaderWorkerSet API" in str(conditions), message
        assert services.deployments() == {}
        assert running.stop() == 0


def test_role_of_groups_comes_up_scales_rolls_and_goes(services, sets, started):
    with started() as running:
        services.apply(decode={"engine": TWO_PODS, "replicas": 2})
        ready(services, sets, running)
        ((name, made),) = sets.all().items()
        assert services.get()["status"]["ready"] == "1/1P 2/2D"
        (owner,) = [one for one in made["metadata"]["ownerReferences"] if one.get("controller")]
        assert owner["uid"] == services.get()["metadata"]["uid"]
        assert sorted(sets.pods(name)) == [f"{name}-0", f"{name}-0-1", f"{name}-1", f"{name}-1-1"]
        budgets = {key[1] for key in services.owned() if key[0] == "poddisruptionbudgets"}
        assert f"{name}-followers" in budgets
        assert ("networkpolicies", "chat-follower") in services.owned()

        # The pool counts workers, not pods, and its scale subresource is the way to change them.
        pool = services.cluster.get(services.pool_path("decode"))["status"]
        assert (pool["replicas"], pool["readyReplicas"]) == (2, 2)
        services.apply(decode={"engine": TWO_PODS, "replicas": 1})
        wait(lambda: sorted(sets.pods(name)) == [f"{name}-0", f"{name}-0-1"], sets, running)
        ready(services, sets, running)

        # From groups to workers of one pod, which are objects of another kind: a revision beside the old one.
        services.apply(decode={"replicas": 1})
        wait(lambda: sets.all() == {}, sets, running)
        ready(services, sets, running)
        assert list(services.workers("decode").values()) == [1]

        services.apply(decode={"engine": TWO_PODS})
        wait(lambda: len(sets.all()) == 1, sets, running)
        services.delete()
        wait(lambda: services.gone() and sets.all() == {}, sets, running)
        assert running.stop() == 0


def test_plugin_shows_a_group_as_one_worker_and_drains_it_whole(
    services, sets, control_plane, namespace, started, capsys
):
    def kubectl(*words: str) -> tuple[int, str]:
        """Exit status, and what is printed."""
        status = command.main([*words, "--kubeconfig", str(control_plane.kubeconfig), "-n", namespace])
        return status, "".join(capsys.readouterr())

    with started() as running:
        services.apply(decode={"engine": TWO_PODS})
        ready(services, sets, running)
        (name,) = sets.all()
        [tree] = json.loads(kubectl("status", "chat", "--no-figures", "-o", "json")[1])
        decode = next(role for role in tree["roles"] if role["role"] == "decode")
        [worker] = decode["revisions"][0]["pods"]
        assert (decode["ready"], worker["pod"]["name"]) == (1, f"{name}-0")
        assert [one["pod"]["name"] for one in worker["followers"]] == [f"{name}-0-1"]
        status, output = kubectl("flip", f"{name}-0-1", "prefill")
        assert (status, f"flip {name}-0" in output) == (3, True)

        before = uids(sets, name)
        # It is not gone before the controller has seen that it leaves.
        sets.hold(f"{name}-0-1")
        # The disruption budgets count pods in a moment of their own.
        wait(lambda: kubectl("drain", f"{name}-0-1", "--no-wait")[0] == 0, sets, running)
        wait(lambda: not sets.pods(name), sets, running)
        sets.release(f"{name}-0-1")
        wait(lambda: len(uids(sets, name)) == 2 and not uids(sets, name) & before, sets, running)
        ready(services, sets, running)
        assert running.stop() == 0


def uids(sets: LeaderWorkerSets, name: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in sets.pods(name).values()}


def ready(services: Services, sets: LeaderWorkerSets, running: OperatorProcess) -> None:
    def settled() -> bool:
        body = services.get()
        return (
            body.get("status", {}).get("observedGeneration") == body["metadata"]["generation"]
            and services.condition("Ready")[0] == "True"
            and services.condition("Progressing") == ("False", "Complete")
        )

    wait(settled, sets, running)


def wait(condition, sets: LeaderWorkerSets, running: OperatorProcess) -> None:
    """While the sets' controller has its turns."""

    def after_a_turn() -> bool:
        sets.turn()
        return bool(condition())

    wait_for(after_a_turn, PATIENCE_S, running.log)
