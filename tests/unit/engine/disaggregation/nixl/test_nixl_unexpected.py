"""Errors that nobody foresaw: commands are carried out all the same, pushes end, no page is free while written to."""

import queue
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tandem_engine.disaggregation.digest import PageDigester
from tandem_engine.disaggregation.nixl.interfaces import Interfaces
from tandem_engine.disaggregation.nixl.layout import Region
from tandem_engine.disaggregation.nixl.outbox import Outbox
from tandem_engine.disaggregation.nixl.thread import Command, Connect, StartPush, Stop, TransferThread
from tandem_engine.disaggregation.transport import Push, PushDone, PushFailed, PushKey, TransportEvent
from tandem_engine.messages.requests import Peer
from tandem_engine.names import PageId
from tandem_testing.digest_pools import digest_pool
from tandem_testing.disagg_network import make_peer
from tandem_testing.nixl_hello import hello_like
from tandem_testing.scheduler_builders import ManualClock

THERE, ELSEWHERE = make_peer("there"), make_peer("elsewhere")
POOL = digest_pool(num_pages=8)
REGION = Region(POOL.address, POOL.page_bytes, POOL.num_pages, "DRAM", 0, layers=POOL.layout.layers)
FOR_EVER = 1 << 30
MOST_TURNS = 10
"""Fewer than there are seconds until a WRITE is given up."""


def push(room: str, to: Peer = THERE, *, target: tuple[int, ...] = (3, 4)) -> Push:
    return Push(
        key=PushKey(room=room, generation=1, first=0, count=2),
        peer=to.incarnation,
        source=(PageId(1), PageId(2)),
        target=tuple(map(PageId, target)),
    )


@dataclass(kw_only=True)
class Nixl:
    """NIXL whose WRITEs are done at the look `ends_at`, and the inbox of its thread.

    `fails` names calls that raise what nobody foresaw. The thread finds a command whenever it asks, while any are left.
    """

    commands: list[Command]
    ends_at: int
    fails: frozenset[str]
    clock: ManualClock = field(default_factory=ManualClock)
    outbox: Outbox = field(default_factory=Outbox)
    happened: list[object] = field(default_factory=list)
    """Calls of NIXL and events of the transport, in order."""
    looks: int = 0
    turns: int = 0

    def get(self, timeout: float) -> Command:
        self.listen()
        self.turns += 1
        if self.commands:
            return self.commands.pop(0)
        if self.turns > MOST_TURNS:
            return Stop()
        raise queue.Empty

    def listen(self) -> None:
        self.happened += self.outbox.take()

    def heard(self) -> list[TransportEvent]:
        return [event for event in self.happened if isinstance(event, PushDone | PushFailed)]

    def told(self, call: str) -> None:
        self.listen()
        self.happened.append(call)
        if call in self.fails:
            raise TypeError(f"nobody foresaw that {call} fails")

    def add_peer(self, name: str, metadata: bytes, region: Region) -> None:
        self.told("add")

    def write_pages(self, peer: str, source: object, target: object) -> object:
        self.told("write")
        return object()

    def progress(self, write: object) -> bool:
        self.clock.time += 1.0
        self.looks += 1
        return self.looks >= self.ends_at

    def release(self, write: object) -> None:
        self.told("release")

    def remove_peer(self, name: str) -> None:
        self.told(f"remove {name}")

    def attend(self) -> None:
        self.told("attend")

    def close(self) -> None:
        self.told("close")


class ScriptedDigester(PageDigester):
    """Does something before it makes digests of what is sent."""

    before: Callable[[], None]

    def sent(self, push: Push) -> tuple[int, ...]:
        self.before()
        return super().sent(push)


def ran(
    *pushes: Push,
    ends_at: int,
    fails: frozenset[str] = frozenset(),
    before_digests: Callable[[Nixl], None] = lambda _: None,
) -> Nixl:
    """All that happened to `pushes`, which are asked for in turn."""
    commands = [*(Connect(hello_like(REGION, peer)) for peer in (THERE, ELSEWHERE)), *map(StartPush, pushes)]
    nixl = Nixl(commands=commands, ends_at=ends_at, fails=fails)
    digester = ScriptedDigester(POOL)
    digester.before = lambda: before_digests(nixl)
    TransferThread(
        agent=nixl,
        digester=digester,
        region=REGION,
        clock=nixl.clock,
        inbox=nixl,
        outbox=nixl.outbox,
        interfaces=Interfaces(clock=nixl.clock),
    ).run()
    nixl.listen()
    nixl.outbox.close()
    return nixl


def cannot_digest(_: Nixl) -> None:
    raise MemoryError("nobody foresaw that digests fail")


@pytest.mark.parametrize("call", ["release", "attend"])
def test_a_command_is_carried_out_though_tidying_up_before_it_fails(call, caplog):
    """`attend` after the WRITE of one push and `release` of it come before the next one."""
    nixl = ran(push("first"), push("second"), push("third"), ends_at=1, fails=frozenset({call}))
    assert [event.key.room for event in nixl.heard()] == ["first", "second", "third"]
    assert all(isinstance(event, PushDone) for event in nixl.heard())
    assert "unexpected error while tidying up" in caplog.text
    # Each WRITE is given back once, whether NIXL takes it or not; and the thread has ended by its command.
    assert nixl.happened.count("release") == 3
    assert nixl.happened[-1] == "close"


def test_stop_is_not_lost_with_an_error_before_it():
    nixl = ran(push("only"), ends_at=FOR_EVER, fails=frozenset({"release", f"remove {THERE.incarnation}"}))
    (event,) = nixl.heard()
    assert event == PushFailed(key=push("only").key, reason="the transport is closing", peer_lost=True)
    assert nixl.happened[-1] == "close"
    assert nixl.turns == MOST_TURNS + 1


def test_a_push_that_cannot_be_looked_through_ends():
    nixl = ran(push("odd", target=()), push("next"), ends_at=1)
    odd, following = nixl.heard()
    assert odd == PushFailed(key=push("odd").key, reason="unexpected error in the transfer thread", peer_lost=False)
    assert isinstance(following, PushDone)


def test_a_peer_is_lost_when_digests_fail_while_nixl_writes_to_it():  # T60
    nixl = ran(push("one"), ends_at=FOR_EVER, before_digests=cannot_digest)
    failed = PushFailed(key=push("one").key, reason="its pages could not be digested", peer_lost=True)
    removed = f"remove {THERE.incarnation}"
    assert [event for event in nixl.happened if event in ("release", removed, failed)] == ["release", removed, failed]
    assert nixl.happened.count(f"remove {ELSEWHERE.incarnation}") == 1, "it stays until the end"
    assert nixl.happened.index(failed) < nixl.happened.index(f"remove {ELSEWHERE.incarnation}")


def test_a_push_alone_fails_when_digests_fail_after_its_write():
    nixl = ran(push("one"), push("two"), ends_at=1, before_digests=cannot_digest)
    assert nixl.heard() == [
        PushFailed(key=push(room).key, reason="its pages could not be digested", peer_lost=False)
        for room in ("one", "two")
    ]
    assert nixl.happened.index(nixl.heard()[-1]) < nixl.happened.index(f"remove {THERE.incarnation}")


def test_any_error_while_nixl_writes_costs_the_peer():  # T60
    """Here `attend` at the end of a turn."""
    nixl = ran(push("one"), push("two", ELSEWHERE), ends_at=FOR_EVER, fails=frozenset({"attend"}))
    for room, peer in (("one", THERE), ("two", ELSEWHERE)):
        reason = "unexpected error in the transfer thread"
        failed = PushFailed(key=push(room, peer).key, reason=reason, peer_lost=True)
        assert nixl.happened.index(f"remove {peer.incarnation}") < nixl.happened.index(failed)


@pytest.mark.parametrize(("ends_at", "seconds"), [(1, 1.0), (2, 2.0), (3, 8.0)])
def test_digests_are_no_part_of_a_write_that_is_done_after_them(ends_at, seconds):
    """Each look takes a second, digests five; a WRITE that is not done after them has gone on meanwhile."""

    def take_long(nixl: Nixl) -> None:
        nixl.clock.time += 5.0

    (done,) = ran(push("one"), ends_at=ends_at, before_digests=take_long).heard()
    assert isinstance(done, PushDone)
    assert done.seconds == seconds
