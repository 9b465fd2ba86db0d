"""The transport that other tests rely on: faults do what they say."""

import pytest

from tandem_engine.base.names import PageId
from tandem_engine.disaggregation.digest import PageDigester
from tandem_engine.disaggregation.transport import Push, PushDone, PushFailed, PushKey
from tandem_engine.forward.kv_progress import KvProgress
from tandem_testing.disagg_network import make_peer
from tandem_testing.ended_step import over
from tandem_testing.fake_executor import make_fake_pool
from tandem_testing.fake_transport import FakeFabric, FakeTransport, Fate
from tandem_testing.scheduler_builders import ManualClock

TARGET = (PageId(5), PageId(6))


class Fabric:
    """A sender with two filled pages, and a receiver that it knows."""

    def __init__(self, num_layers: int = 1) -> None:
        self.fabric, self.clock = FakeFabric(), ManualClock()
        pools = (make_fake_pool(num_pages=8, page_size=4, num_layers=num_layers) for _ in range(2))
        self.sender, self.receiver = (
            self.fabric.join(make_peer(name), pool, self.clock) for name, pool in zip("pd", pools, strict=True)
        )
        self.sender.pool.bytes_view()[1:3] = 7
        self.sender.connect(self.receiver.hello())

    def push(self, fate: Fate | None = None, *, first: int = 0, **more: object) -> None:
        self.fabric.fates = lambda _push: fate or Fate()
        self.sender.push(
            Push(
                key=PushKey(room="room", generation=1, first=first, count=2),
                peer="d@1",
                source=(PageId(1), PageId(2)),
                target=TARGET,
                **{"start_before": 1.0, **more},
            )
        )

    def written(self) -> bool:
        return bool((self.receiver.pool.bytes_view()[5:7] == 7).all())


@pytest.fixture
def fabric() -> Fabric:
    return Fabric()


def kinds(transport: FakeTransport) -> list[type]:
    return [type(event) for event in transport.poll()]


def test_bytes_move_when_the_fabric_advances(fabric):
    fabric.push()
    assert not fabric.written()
    fabric.fabric.advance()
    assert fabric.written()
    assert kinds(fabric.sender) == [PushDone]
    assert kinds(fabric.receiver) == []


def test_delayed_push_lands_later_and_may_be_overtaken(fabric):
    fabric.push(Fate(delay=2))
    fabric.push(first=2)
    for _ in range(3):
        fabric.fabric.advance()
    assert [event.key.first for event in fabric.sender.poll()] == [2, 0]


def test_corrupt_push_arrives_and_does_not_verify(fabric):
    fabric.push(Fate(corrupt=True))
    fabric.fabric.advance()
    (done,) = fabric.sender.poll()
    here = PageDigester(fabric.receiver.pool).begin(TARGET, room="room", generation=1, first=0).take()
    assert [ours == theirs for ours, theirs in zip(here, done.digests, strict=True)] == [False, True]


@pytest.mark.parametrize(("fate", "lost"), [(Fate(fail=True), False), (Fate(lose_peer=True), True)])
def test_failing_push_writes_nothing(fabric, fate, lost):
    fabric.push(fate)
    fabric.fabric.advance()
    (failed,) = fabric.sender.poll()
    assert isinstance(failed, PushFailed)
    assert failed.peer_lost is lost
    assert ("d@1" in fabric.sender.connected) is not lost
    assert not fabric.written()


def test_forgetting_a_peer_fails_its_pending_pushes(fabric):
    fabric.push(Fate(delay=3))
    fabric.sender.forget("d@1")
    assert kinds(fabric.sender) == [PushFailed]
    fabric.fabric.advance()
    assert not fabric.written()


def test_late_start_is_refused(fabric):
    fabric.clock.time = 1.0
    fabric.push(start_before=1.0)
    assert kinds(fabric.sender) == [PushFailed]


def test_killed_receiver_is_lost(fabric):
    fabric.push(Fate(delay=1))
    fabric.fabric.kill("d@1")
    fabric.fabric.advance()
    fabric.fabric.advance()
    assert kinds(fabric.sender) == [PushFailed]


def test_push_that_follows_a_step_moves_some_layers_a_tick():
    fabric = Fabric(num_layers=3)
    progress = KvProgress(fabric.clock)
    fabric.push(progress=progress)
    fabric.fabric.advance()
    assert not fabric.receiver.pool.data.any()
    progress.ended(over())
    seen = []
    for _ in range(3):
        fabric.fabric.advance()
        seen.append([bool(fabric.receiver.pool.data[list(TARGET), layer].any()) for layer in range(3)])
    assert seen == [[True, False, False], [True, True, False], [True, True, True]]
    assert kinds(fabric.sender) == [PushDone]


def test_push_fails_with_its_step(fabric):
    progress = KvProgress(fabric.clock)
    fabric.push(progress=progress)
    progress.ended(over(ValueError("no")))
    fabric.fabric.advance()
    assert kinds(fabric.sender) == [PushFailed]
    assert not fabric.written()
