"""Looking after one service's pods: canaries that are waited for or not, and what becomes of the autoscaler's
outcome."""

import asyncio

import httpx
import pytest

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.controller.canaries import CanaryBook
from tandem_operator.controller.facts import Parts
from tandem_operator.controller.findings import Findings
from tandem_operator.controller.kinds import WORKER_POOL
from tandem_operator.controller.lookout import Lookout, Subject
from tandem_operator.planning.observed import Canary
from tandem_operator.scaling.load import DecodeLoad, Load, PrefillLoad
from tandem_operator.telemetry.looks import Seen
from tandem_operator.telemetry.orders import OrderFailedError
from tandem_testing.kube_cluster import service_of
from tandem_testing.kube_objects import a_deployment, a_pod, a_service, an_object
from tandem_testing.pod_builders import pod, worker

GATEWAY, PREFILL, DECODE = pod("g", "gateway", revision=""), pod("p", "prefill"), pod("d")
GOOD = Canary(passed=True)
OWNER = "uid-ModelService-chat"


class Recorder:
    """Executor and poster of events in one: what they were asked to do, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    async def scale(self, ref, namespace, replicas):
        self.calls.append(("scale", ref.name, replicas))

    async def annotate_costs(self, namespace, costs):
        if costs:
            self.calls.append(("costs", dict(costs)))

    async def post(self, about, told):
        self.calls.append(("event", told.reason))


class Reader:
    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    async def read(self, pods):
        return self.seen


def busy(at: float) -> Load:
    """So much waits for prefill that four workers are needed."""
    prefill = PrefillLoad(queued_tokens=90_000, oldest_wait_s=20, arrived_tokens_per_s=1000, worker_tokens_per_s=1000)
    decode = DecodeLoad(
        running=1,
        waiting=0,
        oldest_wait_s=0,
        arrived_per_s=0.1,
        seconds_each=1,
        worker_places=10,
        used_pages=1,
        worker_pages=100,
    )
    return Load(at=at, age_s=1.0, prefill=prefill, decode=decode)


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def make(recorder):
    async def token(_):
        return "token"

    def made(send=None, *, seen=None, token=token):
        client = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(404)))
        lookout = Lookout(client, recorder, recorder, token, send, CanaryBook(600.0), clock=lambda: 0.0)
        lookout.reader = Reader(seen or Seen(load=None, reason="nothing is there"))
        return lookout

    return made


def subject(**autoscaling):
    bounds = {"scaling": {"maxReplicas": 8}}
    wanted = service_of(autoscaling=autoscaling, prefill=bounds, decode=bounds) if autoscaling else service_of()
    pools = [
        an_object(
            WORKER_POOL,
            f"chat-{role}",
            owner=OWNER,
            metadata={"labels": {"tandem.dev/service": "chat"}},
            spec={"role": role, "replicas": 1, "serviceName": "chat"},
        )
        for role in ("prefill", "decode")
    ]
    deployments = [a_deployment(f"chat-{role}-r1", owner=OWNER, role=role) for role in ("prefill", "decode")]
    workers = [a_pod("p"), a_pod("d", role="decode")]
    return Subject(
        service=a_service(),
        wanted=wanted,
        status=ModelServiceStatus(revision="r1"),
        parts=Parts.of(OWNER, [*pools, *deployments, *workers]),
        pods=(GATEWAY, PREFILL, DECODE),
        now="2026-01-01T00:00:00Z",
    )


async def test_the_first_time_it_waits_for_its_canaries(make):
    async def send(ask, token):
        assert token == "token"
        await asyncio.sleep(0)
        return GOOD

    found = await make(send).ask(subject(), None)
    assert found.canaries == {"r1": GOOD, "": GOOD}


async def test_later_a_slow_canary_is_asked_once_and_not_waited_for(make, monkeypatch):
    monkeypatch.setattr("tandem_operator.controller.lookout.QUICK_S", 0.0)
    answered, asked = asyncio.Event(), []

    async def send(ask, token):
        asked.append(ask.revision)
        await answered.wait()
        return GOOD

    lookout = make(send)
    assert (await lookout.ask(subject(), Findings())).canaries == {}
    assert (await lookout.ask(subject(), Findings())).canaries == {}
    assert sorted(asked) == ["", "r1"]
    answered.set()
    await asyncio.wait([task for _, task in lookout.asking.values()])
    assert (await lookout.ask(subject(), Findings())).canaries == {"r1": GOOD, "": GOOD}
    lookout.close()


async def test_without_a_key_file_the_canary_says_so(make):
    async def no_token(_):
        raise OrderFailedError("Secret 'chat-curve' does not exist yet")

    async def send(ask, token):
        raise AssertionError("nobody can be asked without a token")

    found = await make(send, token=no_token).ask(subject(), None)
    assert found.canaries["r1"] == Canary(passed=False, message="Secret 'chat-curve' does not exist yet")


async def test_what_is_needed_is_written_to_the_pool_and_told(make, recorder):
    workers = {"p": worker("prefill", running=3), "d": worker()}
    lookout = make(seen=Seen(load=busy(0.0), workers=workers))
    found = await lookout.look(subject(mode="internal", flipRoles=False), Findings())
    assert recorder.calls == [("event", "ScaledUp"), ("scale", "chat-prefill", 4)]
    assert [(one.role, one.before, one.after) for one in found.decisions] == [("prefill", 1, 4)]
    assert found.holding == ""


async def test_figures_that_are_absent_hold_everything_and_are_told_once(make, recorder):
    lookout = make()
    wanted = subject(mode="internal")
    found = await lookout.look(wanted, Findings())
    assert found.holding == "nothing is there"
    assert recorder.calls == [("event", "ScalingHeld")]
    lookout.look_at = 0.0
    again = await lookout.look(wanted, found)
    assert again == found
    assert len(recorder.calls) == 1


@pytest.mark.parametrize("mode", ["none", "external"])
async def test_pools_of_others_are_never_written(make, recorder, mode):
    lookout = make(seen=Seen(load=busy(0.0), workers={"p": worker("prefill"), "d": worker()}))
    found = await lookout.look(subject(mode=mode), Findings(holding="as before"))
    assert recorder.calls == []
    assert (found.decisions, found.holding) == (None, "")


async def test_figures_are_read_once_a_period(make):
    lookout = make()
    await lookout.look(subject(), Findings())
    lookout.reader = None
    await lookout.look(subject(), Findings())
