"""What the transfer thread does first when a push ends: who waits for it is told, and only then is NIXL tidied up."""

import queue
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tandem_engine.disaggregation.digest import PageDigester
from tandem_engine.disaggregation.nixl.interfaces import Interfaces
from tandem_engine.disaggregation.nixl.layout import Region
from tandem_engine.disaggregation.nixl.outbox import Outbox
from tandem_engine.disaggregation.nixl.thread import TIDY_PAUSE, Connect, StartPush, Stop, TransferThread
from tandem_engine.disaggregation.transport import Push, PushDone, PushKey, TransportEvent
from tandem_engine.names import PageId
from tandem_testing.digest_pools import digest_pool
from tandem_testing.disagg_network import make_peer
from tandem_testing.nixl_hello import hello_like
from tandem_testing.scheduler_builders import ManualClock

THERE = make_peer("there")
PUSH = Push(
    key=PushKey(room="room", generation=1, first=0, count=2),
    peer=THERE.incarnation,
    source=(PageId(1), PageId(2)),
    target=(PageId(3), PageId(4)),
)


class NotingDigester(PageDigester):
    """Notes when it is asked for what is sent."""

    note: Callable[[str], None]

    def sent(self, push: Push) -> tuple[int, ...]:
        self.note("digest")
        return super().sent(push)


@dataclass(kw_only=True)
class Course:
    """NIXL whose one WRITE is done at the look `ends_at`, the inbox of its thread, and all that happens, in order."""

    ends_at: int
    commands: list[object]
    outbox: Outbox = field(default_factory=Outbox)
    happened: list[str] = field(default_factory=list)
    heard: list[TransportEvent] = field(default_factory=list)
    looks: int = 0

    def get(self, timeout: float) -> object:
        self.heard += self.outbox.take()
        self.happened.append(f"wait {timeout:g}" if self.heard else "wait")
        if self.commands:
            return self.commands.pop(0)
        if len(self.happened) > 20:
            return Stop()
        raise queue.Empty

    def add_peer(self, name: str, metadata: bytes, region: Region) -> None:
        """It is met."""

    def write_pages(self, peer: str, source: object, target: object) -> object:
        self.happened.append("write")
        return object()

    def progress(self, write: object) -> bool:
        self.looks += 1
        self.happened.append("look")
        return self.looks >= self.ends_at

    def release(self, write: object) -> None:
        self.happened.append("release")

    def remove_peer(self, name: str) -> None:
        """It is forgotten."""

    def attend(self) -> None:
        self.happened.append("attend")

    def close(self) -> None:
        """Nothing is open."""


def course(ends_at: int) -> Course:
    """A push whose WRITE is done at its look `ends_at`, from the command on."""
    pool, clock = digest_pool(num_pages=8), ManualClock()
    region = Region(pool.address, pool.page_bytes, pool.num_pages, "DRAM", 0, layers=pool.layout.layers)
    events = Course(ends_at=ends_at, commands=[Connect(hello_like(region, THERE)), StartPush(PUSH)])
    digester = NotingDigester(pool)
    digester.note = events.happened.append
    TransferThread(
        agent=events,
        digester=digester,
        region=region,
        clock=clock,
        inbox=events,
        outbox=events.outbox,
        interfaces=Interfaces(clock=clock),
    ).run()
    events.outbox.close()
    events.happened = events.happened[events.happened.index("write") :]
    (done,) = events.heard
    assert isinstance(done, PushDone)
    assert done.digests == PageDigester(pool).sent(PUSH)
    return events


def test_the_end_of_a_push_is_told_before_nixl_is_tidied_up():
    happened = course(ends_at=1).happened
    assert happened[:6] == ["write", "look", "digest", f"wait {TIDY_PAUSE:g}", "release", "attend"]
    assert happened.count("release") == happened.count("digest") == 1


@pytest.mark.parametrize("ends_at", [2, 3, 5])
def test_pages_are_digested_while_a_fabric_that_writes_by_itself_does(ends_at):
    happened = course(ends_at=ends_at).happened
    assert happened[:4] == ["write", "look", "digest", "look"]
    assert happened.count("look") == ends_at
    assert happened.count("release") == happened.count("digest") == 1
