"""Looking after one service's pods: what becomes of what they say, and of the autoscaler's outcome."""

import httpx
import pytest

from tandem_operator.controller.canary_runner import CanaryBook, Trials
from tandem_operator.controller.observations import Findings
from tandem_operator.controller.pod_poller import Lookout
from tandem_operator.scaling.load import DecodeLoad, Load, PrefillLoad
from tandem_operator.telemetry.samples import Seen
from tandem_testing.kube_cluster import service_of
from tandem_testing.kube_subjects import subject
from tandem_testing.pod_builders import worker

NOTHING = Seen(load=None, reason="nothing is there")


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

    def made(*, seen=NOTHING, external=lambda _: None):
        client = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(404)))
        trials = Trials(client, token, None, CanaryBook(600.0))
        lookout = Lookout(client, recorder, recorder, token, trials, external, clock=lambda: 0.0)
        lookout.reader = Reader(seen)
        return lookout

    return made


def scaled_by(**autoscaling):
    bounds = {"scaling": {"maxReplicas": 8}}
    return subject(service_of(autoscaling=autoscaling, prefill=bounds, decode=bounds))


async def test_what_is_needed_is_written_to_the_pool_and_told(make, recorder):
    workers = {"p": worker("prefill", running=3), "d": worker()}
    lookout = make(seen=Seen(load=busy(0.0), workers=workers))
    found = await lookout.look(scaled_by(mode="internal", flipRoles=False), Findings())
    assert recorder.calls == [("event", "ScaledUp"), ("scale", "chat-prefill", 4)]
    assert [(one.role, one.before, one.after) for one in found.decisions] == [("prefill", 1, 4)]
    assert found.holding == ""


async def test_figures_that_are_absent_hold_everything_and_are_told_once(make, recorder):
    lookout = make()
    wanted = scaled_by(mode="internal")
    found = await lookout.look(wanted, Findings())
    assert found.holding == "nothing is there"
    assert recorder.calls == [("event", "ScalingHeld")]
    lookout.look_at = 0.0
    again = await lookout.look(wanted, found)
    assert again == found
    assert len(recorder.calls) == 1


@pytest.mark.parametrize("mode", ["none", "external"])
async def test_pools_of_others_are_never_written(make, recorder, mode):
    seen = Seen(load=busy(0.0), workers={"p": worker("prefill"), "d": worker()})
    lookout = make(seen=seen, external=lambda _: seen)
    found = await lookout.look(scaled_by(mode=mode), Findings(holding="as before"))
    assert recorder.calls == []
    assert (found.decisions, found.holding) == (None, "")


async def test_pods_of_a_service_that_others_scale_are_not_asked_again(make):
    """Every replica looks at them already; the leader asked each of them twice a period."""
    looked = [None, Seen(load=busy(0.0), workers={"d": worker(slow_links={"p": "tcp"})})]
    asked = []

    def external(key):
        asked.append(str(key))
        return looked.pop(0)

    lookout, wanted = make(external=external), scaled_by(mode="external")
    lookout.reader = None
    known = Findings(links={"d to p": "rdma"})
    assert await lookout.look(wanted, known) == known, "nobody has looked yet"
    lookout.look_at = 0.0
    found = await lookout.look(wanted, known)
    assert found.links == {"d to p": "tcp"}
    assert asked == ["models/chat", "models/chat"]


async def test_figures_are_read_once_a_period(make):
    lookout = make()
    await lookout.look(subject(), Findings())
    lookout.reader = None
    await lookout.look(subject(), Findings())
