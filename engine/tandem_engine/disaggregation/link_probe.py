"""The self-test of a link: WRITEs through the transport that requests use, into scratch pages.

    writer (LinkProber)                                receiver (ProbeTargets)

    1. asked     takes scratch pages to send    ─ Hello, ProbeRequest ▶   takes scratch pages, or rejects
    2. granted   has the receiver's pages       ◀─ Hello, ProbeGrant ─    holds them
    3. writing   one push at a time: one page to connect, two to measure the latency, all of them twice
    4. over      done, failed or given up       ── DrainAck ─────────▶    releases them

Scratch pages are a small share of the pages that requests are not expected to need, so no request waits for them. If
the prefix cache fills all memory, it evicts for them what it would evict for the next prompt, which then finds these
pages on the free list. The receiver's pages are held like those of a handoff that ended early: only the writer's ack or
its fencing releases them [late-write]. A writer tests one link at a time, and a receiver takes part in one test at a
time.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, Protocol

from tandem_engine.base.clock import Clock
from tandem_engine.base.names import PageId
from tandem_engine.disaggregation.base import RoomKey, StageHost, room_key
from tandem_engine.disaggregation.holds import HoldTable
from tandem_engine.disaggregation.notifications import ask_for_ack
from tandem_engine.disaggregation.peers import PeerLink
from tandem_engine.disaggregation.transport import KvTransport, Push, PushDone, PushFailed, PushKey
from tandem_engine.memory.allocator import Writer
from tandem_engine.messages.requests import Peer
from tandem_engine.messages.transfer import DrainAck, ProbeGrant, ProbeRefusal, ProbeRequest, TransferAborted

PROBE_TIMEOUT = 5.0
"""Seconds a test may take, and seconds until it is given up when the peer does not answer."""

SPARE_SHARE = 16
"""A test takes at most this part of the pages that are free, or cached, and not expected to be needed."""

GENERATION = 1
"""Rooms of tests are never used again."""


class ProbeResult(NamedTuple):
    """Figures of one test."""

    size: int
    """Bytes of its largest push."""
    seconds: float
    """Of that push, the better of two."""
    latency_s: float


class ProbeListener(Protocol):
    """Receives the results of tests."""

    def probe_done(self, peer: Peer, result: ProbeResult) -> None: ...

    def probe_failed(self, peer: Peer, reason: str, *, broken: bool) -> None:
        """`broken`: a write failed because the peer could not be reached."""
        ...


class _Timing(NamedTuple):
    pages: int
    seconds: float


class _Failure(NamedTuple):
    reason: str
    broken: bool


@dataclass(kw_only=True, slots=True)
class Probe:
    """One test under way."""

    key: RoomKey
    peer: Peer
    source: tuple[PageId, ...]
    deadline: float
    target: tuple[PageId, ...] = ()
    steps: deque[int] = field(default_factory=deque)
    """Pages of each push to come."""
    timings: list[_Timing] = field(default_factory=list)
    outstanding: PushKey | None = None
    failure: _Failure | None = None
    """Set when it is given up; it is over once nothing is outstanding."""

    def next_push(self) -> Push:
        pages = self.steps.popleft()
        self.outstanding = PushKey(room=self.key.room, generation=self.key.generation, first=0, count=pages)
        return Push(
            key=self.outstanding,
            peer=self.peer.incarnation,
            source=self.source[:pages],
            target=self.target[:pages],
            start_before=self.deadline,
        )

    def result(self, page_bytes: int) -> ProbeResult:
        """Of all pushes but the first, which connects."""
        most = max(timing.pages for timing in self.timings[1:])
        return ProbeResult(
            size=most * page_bytes,
            seconds=min(timing.seconds for timing in self.timings[1:] if timing.pages == most),
            latency_s=min(timing.seconds for timing in self.timings[1:] if timing.pages == 1),
        )


@dataclass(kw_only=True, slots=True)
class LinkProber:
    """The writing side. Scheduler thread only."""

    host: StageHost
    transport: KvTransport
    peers: PeerLink
    clock: Clock
    page_bytes: int
    most_pages: int
    listener: ProbeListener
    _probe: Probe | None = None
    _serial: "count[int]" = field(default_factory=count)

    @property
    def busy(self) -> bool:
        return self._probe is not None

    def start(self, peer: Peer) -> None:
        """Start a test of the link to `peer`; the listener receives its result, possibly at once."""
        assert self._probe is None, f"a test of {peer.incarnation} while {self._probe} is under way"
        source = take_scratch(self.host, self.most_pages)
        if not source:
            self.listener.probe_failed(peer, "memory is short here", broken=False)
            return
        self._probe = probe = Probe(
            key=room_key(f"link:{self.peers.me.incarnation}:{next(self._serial)}", GENERATION),
            peer=peer,
            source=source,
            deadline=self.clock.now() + PROBE_TIMEOUT,
        )
        request = ProbeRequest(room=probe.key.room, sender=self.peers.me, pages=len(source))
        if not (self.peers.send(peer, self.transport.hello()) and self.peers.send(peer, request)):
            self._give_up(probe, "its peer endpoint takes no messages", broken=False)

    def tick(self) -> None:
        """Give up what takes too long."""
        probe = self._probe
        if probe is not None and probe.failure is None and self.clock.now() >= probe.deadline:
            reason = f"it took more than {PROBE_TIMEOUT:g} s" if probe.target else "no answer"
            self._give_up(probe, reason, broken=False)

    def on_grant(self, message: ProbeGrant) -> None:
        probe = self._of(message.room, message.sender)
        if probe is None or probe.failure is not None or probe.target or message.writer != self.peers.me.incarnation:
            self._acknowledge(message.sender, message.room)
            return
        probe.target = tuple(PageId(page) for page in message.pages[: len(probe.source)])
        if not probe.target:
            self._give_up(probe, "no pages were granted", broken=False)
            return
        probe.deadline = min(probe.deadline, self.clock.now() + message.valid_s)
        whole = len(probe.target)
        probe.steps.extend((1, 1, 1, whole, whole))
        self.transport.push(probe.next_push())

    def on_refusal(self, message: ProbeRefusal) -> None:
        probe = self._of(message.room, message.sender)
        if probe is not None and not probe.target:
            self._give_up(probe, f"refused: {message.reason[:200]}", broken=False)

    def on_push_done(self, event: PushDone) -> bool:
        """False: not a push of a test."""
        probe = self._pushed(event.key)
        if probe is None:
            return False
        probe.outstanding = None
        probe.timings.append(_Timing(event.key.count, event.seconds))
        if probe.failure is not None or not probe.steps:
            self._end(probe)
        else:
            self.transport.push(probe.next_push())
        return True

    def on_push_failed(self, event: PushFailed) -> bool:
        """False: not a push of a test."""
        probe = self._pushed(event.key)
        if probe is None:
            return False
        probe.outstanding = None
        probe.failure = probe.failure or _Failure(f"a write failed: {event.reason}", event.peer_lost)
        self._end(probe)
        return True

    def on_abort(self, message: TransferAborted) -> bool:
        """The receiver requests its pages. False: not of a running test."""
        probe = self._of(message.room, message.sender)
        if probe is None:
            return False
        self._give_up(probe, "the receiver ended it", broken=False)
        return True

    def peer_gone(self, incarnation: str) -> None:
        """Its outstanding push, if there is one, is about to fail."""
        if self._probe is not None and self._probe.peer.incarnation == incarnation:
            self._give_up(self._probe, "the peer is gone", broken=False)

    def held_pages(self) -> tuple[PageId, ...]:
        """Scratch pages that are read from (audit)."""
        return () if self._probe is None else self._probe.source

    def _of(self, room: str, sender: Peer) -> Probe | None:
        probe = self._probe
        known = probe is not None and probe.key.room == room and probe.peer.incarnation == sender.incarnation
        return probe if known else None

    def _pushed(self, key: PushKey) -> Probe | None:
        return self._probe if self._probe is not None and self._probe.outstanding == key else None

    def _give_up(self, probe: Probe, reason: str, *, broken: bool) -> None:
        probe.failure = probe.failure or _Failure(reason, broken)
        if probe.outstanding is None:
            self._end(probe)

    def _end(self, probe: Probe) -> None:
        self._probe = None
        self.host.memory.give_back(probe.source)
        self._acknowledge(probe.peer, probe.key.room)
        if probe.failure is not None:
            self.listener.probe_failed(probe.peer, probe.failure.reason, broken=probe.failure.broken)
        else:
            self.listener.probe_done(probe.peer, probe.result(self.page_bytes))

    def _acknowledge(self, peer: Peer, room: str) -> None:
        self.peers.send(peer, DrainAck(room=room, generation=GENERATION, sender=self.peers.me))


@dataclass(kw_only=True, slots=True)
class ProbeTargets:
    """The receiving side. Scheduler thread only."""

    host: StageHost
    transport: KvTransport
    peers: PeerLink
    holds: HoldTable
    """Of tests alone."""

    def on_request(self, message: ProbeRequest) -> None:
        """Grant scratch pages to the sender, or say why not."""
        key = room_key(message.room, GENERATION)
        reason = self._refusal(key)
        pages = take_scratch(self.host, message.pages) if not reason else ()
        if not pages:
            reason = reason or "memory is short"
            self.peers.send(message.sender, ProbeRefusal(room=message.room, sender=self.peers.me, reason=reason))
            return
        self.holds.grant(key, writer=message.sender, pages=pages, valid_s=PROBE_TIMEOUT)
        self.holds.drain(key, pages)
        grant = ProbeGrant(
            room=message.room,
            sender=self.peers.me,
            writer=message.sender.incarnation,
            pages=pages,
            valid_s=PROBE_TIMEOUT,
        )
        # An unsent grant is treated like one whose writer has become silent.
        if self.peers.send(message.sender, self.transport.hello()):
            self.peers.send(message.sender, grant)

    def on_ack(self, message: DrainAck) -> bool:
        """False: not of a test."""
        return self.holds.acked(room_key(message.room, message.generation), writer=message.sender.incarnation)

    def tick(self) -> None:
        """Ask writers that should be through by now."""
        for hold in self.holds.overdue():
            ask_for_ack(hold, holds=self.holds, peers=self.peers, of="self-test of a link")

    def _refusal(self, key: RoomKey) -> str:
        if key in self.holds:
            return "this test has begun already"
        return "another test is under way" if any(self.holds.held_pages()) else ""


def take_scratch(host: StageHost, wanted: int) -> tuple[PageId, ...]:
    """At most `wanted` pages, or none when memory is short. Give them back through `memory.give_back`."""
    allowed = min(wanted, host.spare_pages() // SPARE_SHARE)
    pages = host.memory.reserve_pages(allowed, Writer.PEER) if allowed > 0 else None
    return tuple(pages or ())
