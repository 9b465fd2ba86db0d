"""A WRITE that does not end: both sides wait for its push, so it is given up, and not before its connection is gone."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tandem_engine.base.names import PageId
from tandem_engine.disaggregation.digest import PageDigester
from tandem_engine.disaggregation.nixl.layout import Region
from tandem_engine.disaggregation.nixl.queues import Command, Connect, Outbox, StartPush, Stop
from tandem_engine.disaggregation.nixl.thread import STUCK_S, TransferThread
from tandem_engine.disaggregation.transport import Push, PushDone, PushFailed, PushKey, TransportEvent
from tandem_testing.digest_pools import digest_pool
from tandem_testing.disagg_network import make_peer
from tandem_testing.nixl_hello import hello_like
from tandem_testing.scheduler_builders import ManualClock

THERE = make_peer("there")
KEY = PushKey(room="room", generation=1, first=0, count=2)


@dataclass(kw_only=True)
class SlowAgent:
    """NIXL on one connection, whose WRITEs end when `ends` is true, if ever."""

    outbox: Outbox
    ends: Callable[[], bool]
    calls: list[str] = field(default_factory=list)
    events_before_removal: list[TransportEvent] = field(default_factory=list)

    def add_peer(self, name: str, metadata: bytes) -> None:
        self.calls.append("add")

    def write(self, peer: str, descriptors: object, device: str) -> object:
        self.calls.append("write")
        return object()

    def progress(self, write: object) -> bool:
        return self.ends()

    def release(self, write: object) -> None:
        self.calls.append("release")

    def remove_peer(self, name: str) -> None:
        self.calls.append("remove")
        self.events_before_removal += self.outbox.take()

    def attend(self) -> None:
        """No other peer writes."""

    def close(self) -> None:
        """Nothing is open."""


@dataclass(kw_only=True)
class Hours:
    """Commands, and the time that passes before each."""

    clock: ManualClock
    commands: list[tuple[float, Command]]

    def get(self, timeout: float) -> Command:
        seconds, command = self.commands.pop(0)
        self.clock.time += seconds
        return command


def pushed(seconds: float, *, done: bool) -> tuple[list[str], TransportEvent]:
    """Calls of NIXL, and the end of a push, when the first poll of it after `seconds` finds it `done`."""
    pool, clock, outbox = digest_pool(num_pages=8), ManualClock(), Outbox()
    region = Region(pool.address, pool.page_bytes, pool.num_pages, "DRAM", 0, layers=pool.layout.layers)
    agent = SlowAgent(outbox=outbox, ends=lambda: done and clock.time > 0.0)
    met = Connect(hello_like(region, THERE))
    push = Push(key=KEY, peer=THERE.incarnation, source=(PageId(1), PageId(2)), target=(PageId(3), PageId(4)))
    TransferThread(
        agent=agent,
        digester=PageDigester(pool),
        region=region,
        clock=clock,
        inbox=Hours(clock=clock, commands=[(0.0, met), (0.0, StartPush(push)), (seconds, Stop())]),
        outbox=outbox,
    ).run()
    (event,) = [*agent.events_before_removal, *outbox.take()]
    outbox.close()
    assert done or not agent.events_before_removal, "pages count as free while NIXL may still write to them"
    return agent.calls, event


def test_write_that_does_not_end_fails_and_closes_its_connection():
    calls, event = pushed(STUCK_S + 1.0, done=False)
    assert calls == ["add", "write", "release", "remove"]
    assert event == PushFailed(key=KEY, reason="a WRITE has not ended in 16 s", peer_lost=True)


def test_large_write_has_the_time_that_a_slow_network_takes(monkeypatch):
    monkeypatch.setattr("tandem_engine.disaggregation.nixl.thread.MIN_RATE", 100.0)
    _, event = pushed(STUCK_S + 1.0, done=False)
    assert isinstance(event, PushFailed)
    assert event.reason == "the transport is closing"


def test_write_completed_while_process_was_stopped_succeeds():
    """This process was stopped for a while, or the machine was."""
    calls, event = pushed(STUCK_S + 1.0, done=True)
    assert calls == ["add", "write", "release", "remove"]
    assert isinstance(event, PushDone)
