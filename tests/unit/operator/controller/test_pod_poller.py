"""Polls the pods of one service, and applies the outcome of the autoscaler."""

import httpx
import pytest

from tandem_operator.controller.canary_runner import CanaryRunner, RevisionCanaries
from tandem_operator.controller.cluster import ApiError
from tandem_operator.controller.observations import Observations
from tandem_operator.controller.pod_poller import PodPoller
from tandem_operator.scaling.load import DecodeLoad, Load, PrefillLoad
from tandem_operator.telemetry.samples import LoadReading
from tandem_testing.kube_cluster import service_of
from tandem_testing.kube_subjects import subject
from tandem_testing.pod_builders import worker

NOTHING = LoadReading(load=None, reason="nothing is there")


class Recorder:
    """Applier and event recorder in one: records their calls in order."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.error: Exception | None = None

    async def scale(self, ref, namespace, replicas):
        if self.error is not None:
            raise self.error
        self.calls.append(("scale", ref.name, replicas))

    async def annotate_costs(self, namespace, costs):
        if costs:
            self.calls.append(("costs", dict(costs)))

    async def post(self, about, event):
        self.calls.append(("event", event.reason))


class Reader:
    def __init__(self, seen: LoadReading) -> None:
        self.seen = seen

    async def read(self, pods, model):
        return self.seen


def busy(at: float) -> Load:
    """A prefill queue that needs four workers."""
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
        canary_runner = CanaryRunner(client, token, None, RevisionCanaries(600.0))
        poller = PodPoller(client, recorder, recorder, token, canary_runner, external, clock=lambda: 0.0)
        poller.reader = Reader(seen)
        return poller

    return made


def scaled_by(**autoscaling):
    bounds = {"scaling": {"maxReplicas": 8}}
    return subject(service_of(autoscaling=autoscaling, prefill=bounds, decode=bounds))


async def test_needed_workers_are_written_to_the_pool_and_reported(make, recorder):
    workers = {"p": worker("prefill", running=3), "d": worker()}
    poller = make(seen=LoadReading(load=busy(0.0), workers=workers))
    found = await poller.poll(scaled_by(mode="internal", flipRoles=False), Observations())
    assert recorder.calls == [("event", "ScaledUp"), ("scale", "chat-prefill", 4)]
    assert [(one.role, one.before, one.after) for one in found.decisions] == [("prefill", 1, 4)]
    assert found.holding == ""


async def test_write_that_fails_is_no_change_of_others(make, recorder):
    workers = {"p": worker("prefill", running=3), "d": worker()}
    poller = make(seen=LoadReading(load=busy(0.0), workers=workers))
    now = [0.0]
    poller.clock = lambda: now[0]
    wanted = scaled_by(mode="internal", flipRoles=False)
    await poller.poll(wanted, Observations())
    recorder.error = ApiError(500, "InternalError", "etcd is slow")
    poller.reader.seen = LoadReading(load=busy(60.0), workers=workers)
    now[0] = 60.0
    with pytest.raises(ApiError):
        await poller.poll(wanted, Observations())
    recorder.error = None
    recorder.calls.clear()
    now[0] = 120.0
    found = await poller.poll(wanted, Observations())
    assert ("event", "ReplicasRestored") not in recorder.calls
    assert found.holding == ""


async def test_missing_metrics_hold_scaling_and_are_reported_once(make, recorder):
    poller = make()
    wanted = scaled_by(mode="internal")
    found = await poller.poll(wanted, Observations())
    assert found.holding == "nothing is there"
    assert recorder.calls == [("event", "ScalingHeld")]
    poller.next_read = 0.0
    again = await poller.poll(wanted, found)
    assert again == found
    assert len(recorder.calls) == 1


@pytest.mark.parametrize("mode", ["none", "external"])
async def test_pools_scaled_externally_are_never_written(make, recorder, mode):
    seen = LoadReading(load=busy(0.0), workers={"p": worker("prefill"), "d": worker()})
    poller = make(seen=seen, external=lambda _: seen)
    found = await poller.poll(scaled_by(mode=mode), Observations(holding="as before"))
    assert recorder.calls == []
    assert (found.decisions, found.holding) == (None, "")


async def test_pods_of_an_external_service_are_polled_once(make):
    """Every replica polls them already; the leader polled each of them twice per period."""
    readings = [None, LoadReading(load=busy(0.0), workers={"d": worker(slow_links={"p": "tcp"})})]
    keys = []

    def external(key):
        keys.append(str(key))
        return readings.pop(0)

    poller, wanted = make(external=external), scaled_by(mode="external")
    poller.reader = None
    known = Observations(links={"d to p": "rdma"})
    assert await poller.poll(wanted, known) == known, "not polled yet"
    poller.next_read = 0.0
    found = await poller.poll(wanted, known)
    assert found.links == {"d to p": "tcp"}
    assert keys == ["models/chat", "models/chat"]


async def test_metrics_are_read_once_per_period(make):
    poller = make()
    await poller.poll(subject(), Observations())
    poller.reader = None
    await poller.poll(subject(), Observations())


async def test_pools_changed_by_hand_are_restored_once_and_then_left(make, recorder):
    workers = {"p": worker("prefill", running=3), "d": worker()}
    poller = make(seen=LoadReading(load=busy(0.0), workers=workers))
    now = [0.0]
    poller.clock = lambda: now[0]
    wanted = scaled_by(mode="internal", flipRoles=False)
    found = await poller.poll(wanted, Observations())
    recorder.calls.clear()
    # The subject still has one worker, whatever is written: a user sets it back.
    for now[0] in (60.0, 66.0, 72.0):
        found = await poller.poll(wanted, found)
    assert recorder.calls == [("event", "ReplicasRestored"), ("scale", "chat-prefill", 4), ("event", "ScalingHeld")]
    assert "changed by someone else" in found.holding
    assert [one.action for one in found.decisions] == ["hold", "restore", "scale"]
