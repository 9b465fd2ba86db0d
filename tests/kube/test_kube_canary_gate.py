"""What is new gets no client's request before it was tried: workers stand by until a canary has passed through them.


The workers' own half is in tests/integration/test_worker_service.py.
"""

from contextlib import ExitStack

import pytest

from tandem_testing.control_plane import KUBE, PATIENCE_S
from tandem_testing.kube_answering import answering
from tandem_testing.operator_process import operator
from tandem_testing.waiting import wait_equal, wait_for

pytestmark = KUBE

OTHER_MODEL = {"model": {"path": "/opt/tandem/models/tandem-mini-eagle"}}


@pytest.fixture
def pods(services):
    with answering(services) as one:
        yield one


@pytest.fixture
def start(operator_kubeconfig, namespace, tmp_path):
    """Operators of this namespace that send canaries; those that still run are ended."""
    with ExitStack() as running:

        def start_one(name):
            flags = ("--canary", "on", "--namespaces", namespace, "--no-leader-elect")
            return running.enter_context(operator(operator_kubeconfig, tmp_path / f"{name}.log", *flags))

        yield start_one


def test_first_revision_is_ready_when_its_canary_has_passed(services, pods, start):
    running = start("first")
    services.apply(**pods.spec(decode={"replicas": 2}))
    services.wait_ready()
    (revision,) = services.workers("decode")
    requests = pods.requests_of(revision)
    assert requests[0] == "passed"
    assert len(pods.offered) == 3, "both roles, also those that were not in the canary"
    assert "passed" in pods.requests_of(""), "and one through the gateway"
    # A pod that comes later is tried itself, and kept away while no canary passes through it.
    known = set(pods.offered)
    pods.broken = lambda name: name not in known
    services.apply(**pods.spec(decode={"replicas": 3}))
    services.wait_condition("Degraded", "True", "PodsFailing")
    (degraded,) = [one for one in services.get()["status"]["conditions"] if one["type"] == "Degraded"]
    assert "no canary passes through chat-decode-" in degraded["message"]
    assert pods.offered == known, running.log()
    assert services.condition("Ready")[0] == "True", "the others serve"
    pods.broken = lambda _: False
    wait_equal(lambda: len(pods.offered), 4, PATIENCE_S, running.log)
    services.wait_condition("Degraded", "False", "AllWell")


def test_revision_whose_canary_fails_is_offered_after_later_pass(services, pods, start):
    first = start("first")
    services.apply(**pods.spec(decode={"replicas": 2}))
    services.wait_ready()
    (old,) = services.workers("decode")
    pods.passing = lambda revision: revision in (old, "")
    services.apply(**pods.spec(decode={"replicas": 2}, **OTHER_MODEL))
    services.wait_condition("Degraded", "True", "CanaryFailed")
    (new,) = services.workers("decode").keys() - {old}
    wait_for(lambda: pods.requests_of(new).count("canary") >= 2, PATIENCE_S, first.log)
    assert "offer" not in pods.requests_of(new)
    assert services.workers("decode") == {old: 2, new: 1}, "nothing else has moved"
    assert services.condition("Ready")[0] == "True"
    shares = {one["name"]: one.get("share", 0) for one in services.get()["status"]["revisions"]}
    assert shares == {old: 1, new: 0}
    # All that the next one knows is what the API server and the workers say.
    first.kill()
    second = start("second")
    tried = len(pods.requests_of(new))
    wait_for(lambda: len(pods.requests_of(new)) > tried, PATIENCE_S, second.log)
    assert "offer" not in pods.requests_of(new)
    pods.passing = lambda _: True
    wait_equal(lambda: services.workers("decode"), {new: 2}, PATIENCE_S, second.log)
    services.wait_ready()
    requests = pods.requests_of(new)
    assert requests.index("passed") < requests.index("offer")


def test_revert_removes_standby_workers(services, pods, start):
    start("first")
    services.apply(**pods.spec())
    services.wait_ready()
    (old,) = services.workers("decode")
    pods.passing = lambda revision: revision in (old, "")
    services.apply(**pods.spec(**OTHER_MODEL))
    services.wait_condition("Degraded", "True", "CanaryFailed")
    services.apply(**pods.spec())
    services.wait_ready()
    wait_equal(lambda: services.workers("decode"), {old: 1}, PATIENCE_S)
    services.wait_condition("Degraded", "False", "AllWell")
