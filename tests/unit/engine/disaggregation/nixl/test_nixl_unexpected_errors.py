"""Unexpected errors: every command has its answer, pushes end, and no page counts as free while written to."""

import queue
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tandem_engine.base.names import DigestKind, PageId
from tandem_engine.disaggregation.digest import Making, PageDigester
from tandem_engine.disaggregation.nixl.layout import Region
from tandem_engine.disaggregation.nixl.queues import (
    AGAIN_AFTER,
    Command,
    Connect,
    Forget,
    Outbox,
    StartPush,
    Stop,
    TransportErrors,
)
from tandem_engine.disaggregation.nixl.thread import UNEXPECTED, TransferThread
from tandem_engine.disaggregation.transport import (
    DigestOrder,
    Digests,
    Push,
    PushDone,
    PushFailed,
    PushKey,
    TransportEvent,
)
from tandem_engine.messages.requests import Peer
from tandem_testing.digest_pools import digest_pool
from tandem_testing.disagg_network import make_peer
from tandem_testing.nixl_hello import hello_like
from tandem_testing.scheduler_builders import ManualClock

THERE, ELSEWHERE = make_peer("there"), make_peer("elsewhere")
POOL = digest_pool(num_pages=8)
REGION = Region(POOL.address, POOL.page_bytes, POOL.num_pages, "DRAM", 0, layers=POOL.layout.layers)
FOR_EVER = 1 << 30
MAX_TURNS = 10
"""Fewer than there are seconds until a WRITE is given up."""
PAGES = (PageId(1), PageId(2))


def push(room: str, to: Peer = THERE, *, target: tuple[int, ...] = (3, 4)) -> Push:
    return Push(
        key=PushKey(room=room, generation=1, first=0, count=2),
        peer=to.incarnation,
        source=PAGES,
        target=tuple(map(PageId, target)),
    )


def order(room: str) -> DigestOrder:
    return DigestOrder(room=room, generation=1, pages=PAGES, kind=DigestKind.SAMPLED, tail=0)


@dataclass(kw_only=True)
class Nixl:
    """NIXL whose WRITEs are done at the look `ends_at`, and the inbox of its thread.

    `fails` names calls that raise an unexpected error. The thread finds a command whenever it asks, while any are left.
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
    errors: int = 0

    def get(self, timeout: float) -> Command:
        self.listen()
        self.turns += 1
        if self.commands:
            return self.commands.pop(0)
        if self.turns > MAX_TURNS:
            return Stop()
        raise queue.Empty

    def listen(self) -> None:
        self.happened += self.outbox.take()

    def events(self) -> list[TransportEvent]:
        return [event for event in self.happened if isinstance(event, PushDone | PushFailed | Digests)]

    def note(self, call: str) -> None:
        self.listen()
        self.happened.append(call)
        if call in self.fails:
            raise TypeError(f"nobody foresaw that {call} fails")

    def add_peer(self, name: str, metadata: bytes) -> None:
        self.note(f"add {name}")

    def write(self, peer: str, descriptors: object, device: str) -> object:
        self.note("write")
        return object()

    def progress(self, write: object) -> bool:
        self.clock.time += 1.0
        self.looks += 1
        self.note("look")
        return self.looks >= self.ends_at

    def release(self, write: object) -> None:
        self.note("release")

    def remove_peer(self, name: str) -> None:
        self.note(f"remove {name}")

    def attend(self) -> None:
        self.note("attend")

    def close(self) -> None:
        self.note("close")


class ScriptedDigester(PageDigester):
    """Does something before it makes digests."""

    before: Callable[[], None]

    def begin(self, *args: object, **kwargs: object) -> Making:
        self.before()
        return super().begin(*args, **kwargs)


def ran(
    *commands: Command,
    ends_at: int = 1,
    fails: frozenset[str] = frozenset(),
    before_digests: Callable[[], None] = lambda: None,
) -> Nixl:
    """All that happened when these were asked for in turn, after both peers had greeted."""
    greetings = [Connect(hello_like(REGION, peer)) for peer in (THERE, ELSEWHERE)]
    nixl = Nixl(commands=[*greetings, *commands], ends_at=ends_at, fails=fails)
    digester = ScriptedDigester(POOL)
    digester.before = before_digests
    thread = TransferThread(
        agent=nixl, digester=digester, region=REGION, clock=nixl.clock, inbox=nixl, outbox=nixl.outbox
    )
    thread.run()
    nixl.listen()
    nixl.outbox.close()
    nixl.errors = thread.errors.count
    assert nixl.happened[-1] == "close", "the thread ends by its command alone"
    return nixl


def cannot_digest() -> None:
    raise MemoryError("nobody foresaw that digests fail")


def failed(one: Push, *, peer_lost: bool, reason: str = UNEXPECTED) -> PushFailed:
    return PushFailed(key=one.key, reason=reason, peer_lost=peer_lost)


def test_pushes_complete_despite_errors_in_peer_polling(caplog):
    nixl = ran(StartPush(push("first")), StartPush(push("second")), fails=frozenset({"attend"}))
    assert [type(event) for event in nixl.events()] == [PushDone, PushDone]
    assert "unexpected error while attending to peers" in caplog.text
    assert nixl.errors == nixl.happened.count("attend") > MAX_TURNS


def test_completed_write_is_reported_although_release_fails():
    """The other peer's pushes continue, and the command after it is carried out."""
    first, second = push("first"), push("second", ELSEWHERE)
    nixl = ran(StartPush(first), StartPush(second), fails=frozenset({"release"}))
    assert [(type(event), event.key) for event in nixl.events()] == [(PushDone, first.key), (PushDone, second.key)]
    assert nixl.happened.count(f"remove {THERE.incarnation}") == 1
    assert nixl.happened.count("release") == 2, "each is given back once, whether NIXL takes it or not"
    assert nixl.errors == 2


@pytest.mark.parametrize("call", ["release", f"remove {THERE.incarnation}"])
def test_forgotten_peer_fails_its_pushes_despite_nixl_errors(call):
    one = push("one")
    nixl = ran(StartPush(one), Forget(THERE.incarnation), StartPush(push("late")), ends_at=FOR_EVER, fails={call})
    gone, late = nixl.events()
    assert gone == failed(one, peer_lost=True, reason="the peer was forgotten")
    assert late.reason == f"not connected to {THERE.incarnation}"
    gone_at, reported_at = nixl.happened.index(f"remove {THERE.incarnation}"), nixl.happened.index(gone)
    assert nixl.happened.index("release") < gone_at < reported_at


def test_stop_is_obeyed_though_nothing_can_be_given_back():
    one = push("one")
    fails = frozenset({"release", f"remove {THERE.incarnation}", f"remove {ELSEWHERE.incarnation}", "close"})
    nixl = ran(StartPush(one), ends_at=FOR_EVER, fails=fails)
    assert nixl.events() == [failed(one, peer_lost=True, reason="the transport is closing")]
    assert nixl.errors == len(fails)


@pytest.mark.parametrize("call", ["write", "look"])
def test_error_while_nixl_writes_costs_that_peer_and_no_other(call):  # [late-write]
    """Its connection is gone before the receiver is notified that its pages are free."""
    one = push("one")
    nixl = ran(StartPush(one), Connect(hello_like(REGION, THERE)), ends_at=FOR_EVER, fails=frozenset({call}))
    assert nixl.events() == [failed(one, peer_lost=True)]
    gone, reported = (
        nixl.happened.index(event) for event in (f"remove {THERE.incarnation}", failed(one, peer_lost=True))
    )
    assert gone < reported
    assert nixl.happened.index(f"remove {ELSEWHERE.incarnation}") > reported
    assert nixl.happened.count(f"add {THERE.incarnation}") == 2, "it is met again when it greets again"


def test_push_that_cannot_be_looked_through_fails_alone():
    odd, following = push("odd", target=()), push("next")
    nixl = ran(StartPush(odd), StartPush(following))
    assert nixl.events()[0] == failed(odd, peer_lost=False)
    assert isinstance(nixl.events()[1], PushDone)


def test_push_fails_alone_when_its_pages_cannot_be_digested():
    pushes = [push("one"), push("two")]
    nixl = ran(*map(StartPush, pushes), before_digests=cannot_digest)
    reason = "its pages could not be digested"
    assert nixl.events() == [failed(one, peer_lost=False, reason=reason) for one in pushes]
    assert nixl.happened.index(nixl.events()[-1]) < nixl.happened.index(f"remove {THERE.incarnation}")


def test_pages_that_cannot_be_digested_count_as_damaged():
    """The waiting command would wait forever, and the one after it is answered."""
    errors = [MemoryError("nobody foresaw this")]

    def fail_once() -> None:
        if errors:
            raise errors.pop()

    nixl = ran(order("torn"), order("whole"), before_digests=fail_once)
    torn, whole = nixl.events()
    assert torn == Digests(room="torn", generation=1, digests=(0, 0))
    assert whole.digests == PageDigester(POOL).begin(PAGES, room="whole", generation=1, first=0).take()
    assert 0 not in whole.digests


def test_push_to_peer_that_failed_to_connect_fails():
    one = push("one")
    nixl = ran(StartPush(one), fails=frozenset({f"add {THERE.incarnation}"}))
    assert nixl.events() == [failed(one, peer_lost=True, reason=f"not connected to {THERE.incarnation}")]
    assert f"remove {THERE.incarnation}" in nixl.happened, "NIXL may know it"


def test_repeated_unexpected_error_is_counted_and_rate_limited(caplog):
    errors = TransportErrors(clock=(clock := ManualClock()))

    def happen(during: str) -> None:
        with errors.attempt(during, "p@1") as attempt:
            raise ValueError(during)
        assert attempt.failed

    for _ in range(3):
        happen("writing")
    happen("reading")
    clock.time += AGAIN_AFTER
    happen("writing")
    assert [record.message.rpartition("while ")[2] for record in caplog.records] == [
        "writing (peer p@1)",
        "reading (peer p@1)",
        "writing (peer p@1)",
    ]
    assert errors.count == 5


@pytest.mark.parametrize("name", ["_timeout", "_obey", "_collect", "_tidy"])
def test_thread_survives_an_error_in_any_part_of_a_turn(name, monkeypatch):
    real, raised = getattr(TransferThread, name), []

    def failing(*args, **kwargs):
        if not raised:
            raised.append(name)
            raise TypeError(f"nobody foresaw that {name} fails")
        return real(*args, **kwargs)

    monkeypatch.setattr(TransferThread, name, failing)
    later = order("late")
    nixl = ran(StartPush(push("one")), later, StartPush(push("late")), StartPush(push("later", ELSEWHERE)))
    assert raised
    assert nixl.errors >= 1
    assert any(isinstance(event, PushDone) for event in nixl.events()), "later commands are carried out"


def test_canceled_push_fails_though_its_failure_raised(monkeypatch):
    """Nothing was written: it must not count as done, nor wait forever."""
    real, raised = TransferThread._fail, []

    def failing(*args, **kwargs):
        if not raised:
            raised.append(1)
            raise TypeError("nobody foresaw this")
        return real(*args, **kwargs)

    monkeypatch.setattr(TransferThread, "_fail", failing)
    one = push("one")
    nixl = ran(StartPush(one), Forget(THERE.incarnation), ends_at=FOR_EVER)
    assert nixl.events() == [failed(one, peer_lost=True)]
    assert nixl.errors == 1


def test_agent_is_closed_though_a_peer_cannot_be_left(monkeypatch):
    real, raised = TransferThread._lose, []

    def failing(*args, **kwargs):
        if not raised:
            raised.append(1)
            raise TypeError("nobody foresaw this")
        return real(*args, **kwargs)

    monkeypatch.setattr(TransferThread, "_lose", failing)
    nixl = ran()
    assert f"remove {ELSEWHERE.incarnation}" in nixl.happened
    assert nixl.errors == 1
