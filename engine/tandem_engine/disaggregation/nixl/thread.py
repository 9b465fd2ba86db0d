"""The thread that owns NIXL.

    scheduler thread                              this thread
    Connect, Forget, StartPush, DigestOrder ─▶    executes them in order
    Expect (how closely to attend)                progresses writes, its own and those of peers
    poll ◀──outbox, wakeup descriptor───────────  PushDone, PushFailed, Digests

    forward thread
    Wake (a step is over)         ─inbox──▶       writes what waited for its layers

Each iteration takes a command, or waits for one as long as nothing is urgent, and progresses outstanding pushes.

Digests of pages in main memory are made here, once the pages are written: the write has brought them into the cache.
Those of pages on a device are queued there during the last WRITE, and this thread looks for both.

A push is one WRITE, or several in order as the step that computes its pages writes layer after layer: each starts when
the one before is done. A completed WRITE has arrived, and no NIXL notification goes with it: the sender would wait
until the receiver has polled twice, and it sends a `HandoffRecord` anyway.

A NIXL error disconnects the peer concerned and never stops the thread [peer-error-contained]: every accepted push ends
in exactly one `PushDone` or `PushFailed`. So does a WRITE that does not complete: a connection that only the other side
has closed gives no error, and pages of both sides wait for the push. An unexpected error (`TransportErrors`) affects
only what it concerns: the command gets a result, a push fails, and a peer that NIXL may be writing to is disconnected.

Once the agent is cut off from its network (`agent`), pushes fail and nothing is written here any more. The process
keeps running: without an address it can do no harm, and once the address is back it soon learns whether it is fenced.
If it is not, it requests its own drain, because only a new process can transfer KV again.
"""

import contextlib
import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from tandem_engine.base.clock import Clock
from tandem_engine.base.errors import TransferError
from tandem_engine.disaggregation.digest import Making, PageDigester, answer, unproved
from tandem_engine.disaggregation.nixl.agent import Interfaces, NixlAgent, Write
from tandem_engine.disaggregation.nixl.layout import Descriptors, Region, describe, describe_packed, regions_of
from tandem_engine.disaggregation.nixl.queues import (
    Command,
    Connect,
    Expect,
    Forget,
    Outbox,
    StartPush,
    Stop,
    TransportErrors,
    Wake,
)
from tandem_engine.disaggregation.packed_pages import SLOT_WAIT_S, PackedPages, PackedSlot
from tandem_engine.disaggregation.transport import (
    MIN_RATE,
    DigestOrder,
    HeadPart,
    Push,
    PushDone,
    PushFailed,
    PushKey,
)
from tandem_engine.executor.forward_thread import TURN_S
from tandem_engine.forward.kv_progress import VOID
from tandem_engine.messages.transfer import Hello
from tandem_engine.parallel.group import use_device

logger = logging.getLogger(__name__)
T = TypeVar("T")
FIRST_PAUSE = 50e-6

MAX_PAUSE = 1e-3
"""Seconds between looks at writes and digests under way."""

PAUSE_SHARE = 8
"""Between both, a pause is this part of the time since one of them began: the end of a write is noticed after an eighth
of its time."""

LAYERS_PAUSE = 1e-3
"""While a step computes pages. A look costs the forward a little, as both need the interpreter."""

EXPECTING_PAUSE = 1e-3
"""While a peer may be writing here: its writes only progress when this side looks."""

BUSY_LOOK = 20e-6
"""Seconds. A look that takes longer has moved bytes, so there is no pause before the next: over TCP, writes progress at
the pace at which both sides look."""

STUCK_S = 15.0
"""A WRITE is given up after so many seconds, and those that its pages take at `MIN_RATE`. A receiver that stands
still is fenced before: what lies in its sockets may not reach pages that it uses again [late-write]."""

IDLE_PAUSE = 50e-3
"""Otherwise. Connections of peers still need this side to look now and then."""

UNEXPECTED = "unexpected error in the transfer thread"
"""Reason of a push that fails by an unexpected error."""

LEAVE_AFTER = 5.0
"""Seconds for which a network interface has been back, as another one, when this process asks to leave: several
heartbeats, by which a fenced one has ended."""


@dataclass(kw_only=True, slots=True)
class _Outstanding:
    push: Push
    seconds: float = 0.0
    """In writes that are done; the wait for layers is not the transfer's."""
    began: float = 0.0
    """When `write` was started."""
    give_up: float = math.inf
    """Monotonic time at which `write` should have been done long since."""
    layers: int = 0
    """Layers [0, layers) are written, or being written by `write`."""
    pages: int = 0
    """Of the next layers, pages [0, pages) too, of a push that is packed in several parts."""
    until: int = 0
    """Where those layers stop."""
    slot_by: float = 0.0
    """When it waits no longer for a slot; 0.0 if it does not wait."""
    slot: PackedSlot | None = None
    """What is to be written next, or is being written."""
    write: Write | None = None
    digests: Making | None = None
    """Begun."""


@dataclass(frozen=True, slots=True)
class _Ordered:
    order: DigestOrder
    digests: Making


@dataclass(kw_only=True, slots=True)
class TransferThread:
    """Runs `run` on a separate thread; everything else here belongs to that thread."""

    agent: NixlAgent
    digester: PageDigester
    region: Region
    clock: Clock
    inbox: "queue.SimpleQueue[Command]"
    outbox: Outbox
    packed: PackedPages | None = None
    """Of the pool; None where no push is packed."""
    further: tuple[Region, ...] = ()
    """Of groups of layers next to pages, from group 1 on."""
    interfaces: Interfaces = field(default_factory=Interfaces)
    """Those of the agent."""
    leave: Callable[[str], None] = lambda _: None
    """Reports that this process should be replaced by a new one, with the reason."""
    errors: TransportErrors = field(init=False)
    _peers: dict[str, tuple[Region, ...]] = field(default_factory=dict)
    """Of each group."""
    _outstanding: dict[PushKey, _Outstanding] = field(default_factory=dict)
    _ordered: list[_Ordered] = field(default_factory=list)
    """Digests of received pages that a device is making."""
    _expected: int = 0
    _began: float = 0.0
    """When the last command came, or a write or digests began."""
    _busy: bool = False
    """A look of the last turn has moved bytes."""
    _back_since: float | None = None
    """When the interface that was lost was seen again first."""
    _stopped: bool = False

    def __post_init__(self) -> None:
        self.errors = TransportErrors(clock=self.clock)

    def start(self) -> threading.Thread:
        """Shortens the process's switch interval to `TURN_S`, as a forward on a thread does.

        Calls here are short, and after each that releases the interpreter the scheduler could keep it for 5 ms.
        """
        sys.setswitchinterval(min(TURN_S, sys.getswitchinterval()))
        thread = threading.Thread(target=self.run, name="nixl", daemon=True)
        thread.start()
        return thread

    def run(self) -> None:
        use_device(self.region.torch_device)
        while not self._stopped:
            # Without this thread no KV would be moved, and the engine would serve on.
            with self.errors.attempt("a turn of transfers") as turn:
                self._turn()
            if turn.failed:
                time.sleep(IDLE_PAUSE)
        for peer in [*self._peers]:
            self._tidy("leaving a peer", partial(self._lose, peer, "the transport is closing"), peer)
        self._tidy("closing NIXL", self.agent.close)

    def _turn(self) -> None:
        """Each part of it for itself: what fails in one costs no other its turn."""
        with contextlib.suppress(queue.Empty):
            command = self.inbox.get(timeout=self._timeout())
            self._began = self.clock.now()
            self._obey(command)
        self._busy = False
        for outstanding in [*self._outstanding.values()]:
            with self.errors.attempt("writing a push", outstanding.push.peer) as writing:
                self._progress(outstanding)
            if writing.failed:
                # NIXL may have started the write: the connection is closed before the receiver is notified
                # [late-write].
                self._lose(outstanding.push.peer, UNEXPECTED)
        self._ordered = [ordered for ordered in self._ordered if not self._collect(ordered)]
        self._tidy("attending to peers", partial(self._looked, self.agent.attend))
        if self.interfaces.lost:
            self._tidy("asking to leave", self._leave_when_back)

    def _obey(self, command: Command) -> None:
        with self.errors.attempt(f"carrying out {type(command).__name__}") as attempt:
            self._carry_out(command)
        if attempt.failed:
            self._answer(command)

    def _answer(self, command: Command) -> None:
        """Report a command that failed, so that no caller waits forever for it."""
        match command:
            case StartPush(push) if push.key in self._outstanding:
                self._fail(self._outstanding[push.key], UNEXPECTED, peer_lost=False)
            case DigestOrder():
                self.outbox.put(unproved(command))
            case Connect(hello):
                self._lose(hello.sender.incarnation, UNEXPECTED)

    def _tidy(self, during: str, call: Callable[[], object], peer: str = "") -> bool:
        """Whether `call` has succeeded; no caller waits for it."""
        with self.errors.attempt(during, peer) as attempt:
            call()
        return not attempt.failed

    def _leave_when_back(self) -> None:
        if not self.interfaces.back:
            self._back_since = None
        elif self._back_since is None:
            self._back_since = self.clock.now()
        elif self.clock.now() - self._back_since > LEAVE_AFTER:
            self.leave(f"{self.interfaces.lost}, and only a new process can move KV again")

    def _timeout(self) -> float:
        """Seconds to wait for a command before looking at NIXL again."""
        if self._busy:
            return 0.0
        if self._ordered or any(each.write or each.slot or each.digests for each in self._outstanding.values()):
            return min(max(FIRST_PAUSE, (self.clock.now() - self._began) / PAUSE_SHARE), MAX_PAUSE)
        if self._outstanding:
            return LAYERS_PAUSE
        return EXPECTING_PAUSE if self._expected else IDLE_PAUSE

    def _carry_out(self, command: Command) -> None:
        match command:
            case StartPush(push):
                self._start(push)
            case DigestOrder():
                ordered = _Ordered(command, self.digester.begin_order(command))
                if not self._collect(ordered):
                    self._ordered.append(ordered)
            case Expect(transfers):
                self._expected = transfers
            case Connect(hello):
                self._connect(hello)
            case Forget(incarnation):
                self._lose(incarnation, "the peer was forgotten")
            case Wake():
                pass
            case Stop():
                self._stopped = True

    def _collect(self, ordered: _Ordered) -> bool:
        """Answer an order. False: a device is still making its digests."""
        with self.errors.attempt("digesting what was received") as attempt:
            if not ordered.digests.ready():
                return False
            self.outbox.put(answer(ordered.order, ordered.digests))
        if attempt.failed:
            self.outbox.put(unproved(ordered.order))
        return True

    def _looked(self, look: Callable[[], T]) -> T:
        """The answer of a look at NIXL, and whether to look again at once."""
        began = self.clock.now()
        answer = look()
        self._busy |= self.clock.now() - began > BUSY_LOOK
        return answer

    # Peers

    def _connect(self, hello: Hello) -> None:
        peer = hello.sender.incarnation
        if peer in self._peers:
            return
        try:
            self._peers[peer] = regions_of(hello, self.region, self.further)
            self.agent.add_peer(peer, hello.nixl_metadata)
        except TransferError as error:
            self._peers.pop(peer, None)
            logger.warning("cannot connect to %r: %s", peer, error)

    def _lose(self, peer: str, reason: str) -> None:
        """End every push to `peer` and drop its mappings. Unknown peers are ignored."""
        if self._peers.pop(peer, None) is None:
            return
        ended = [outstanding for outstanding in self._outstanding.values() if outstanding.push.peer == peer]
        for outstanding in ended:
            self._release(outstanding)
        # Before anything is reported: the receiver reuses its pages once it is notified [late-write].
        self._tidy("removing a peer", partial(self.agent.remove_peer, peer), peer)
        for outstanding in ended:
            self._fail(outstanding, reason, peer_lost=True)

    # Pushes

    def _start(self, push: Push) -> None:
        # First, so that it ends whatever happens.
        self._outstanding[push.key] = _Outstanding(push=push)
        refusal = self._refusal(push)
        if refusal is not None:
            del self._outstanding[push.key]
            self.outbox.put(refusal)
        elif push.progress is not None:
            push.progress.on_end(lambda: self.inbox.put(Wake()))

    def _refusal(self, push: Push) -> PushFailed | None:
        regions = self._peers.get(push.peer)
        if regions is None:
            return PushFailed(key=push.key, reason=f"not connected to {push.peer}", peer_lost=True)
        if self.clock.now() >= push.start_before:
            return PushFailed(key=push.key, reason="the grant expired", peer_lost=False)
        there = regions[push.key.group]
        if push.heads is None and there.heads != self._region(push).heads:
            reason = f"whole pages of {self._region(push).heads} heads for a pool of pages of {there.heads}"
            return PushFailed(key=push.key, reason=reason, peer_lost=False)
        lowest, highest = min(push.target), max(push.target)
        if lowest < 1 or highest >= there.num_pages:
            outside = lowest if lowest < 1 else highest
            reason = f"page {outside} was granted, the pool of {push.peer} has pages 1 to {there.num_pages - 1}"
            return PushFailed(key=push.key, reason=reason, peer_lost=False)
        return None

    def _progress(self, outstanding: _Outstanding) -> None:
        """Take a push as far as it goes without waiting."""
        if outstanding.push.peer not in self._peers:
            # An unexpected error has kept `_lose` from ending it. Its WRITE was canceled, so it is not done.
            self._fail(outstanding, UNEXPECTED, peer_lost=True)
            return
        while outstanding.push.key in self._outstanding:
            if outstanding.write is not None:
                step = self._finish_write
            elif outstanding.slot is not None:
                step = self._write_slot
            else:
                written = outstanding.layers == self._region(outstanding.push).layers
                step = self._finish if written else self._write_more
            if not step(outstanding):
                return

    def _write_more(self, outstanding: _Outstanding) -> bool:
        """Start to write the layers that are ready. False: there are too few, or the push has failed."""
        push = outstanding.push
        total = self._region(push).layers
        ready = total if push.progress is None else min(push.progress.layers, total)
        if ready == VOID:
            self._fail(outstanding, "the step that computed its pages failed", peer_lost=False)
        elif self.clock.now() >= push.start_before:
            self._fail(outstanding, "the grant expired", peer_lost=False)
        elif ready == total or ready >= outstanding.layers + push.least_layers:
            layers = range(outstanding.layers, outstanding.until if outstanding.pages else ready)
            if push.packed and push.heads is not None:
                return self._write_packed(outstanding, layers, push.heads)
            here, there = self._region(push), self._peers[push.peer][push.key.group]
            self._write(outstanding, layers, describe(here, push.source, there, push.target, layers, push.heads))
            return True
        return False

    def _write_packed(self, outstanding: _Outstanding, layers: range, heads: HeadPart) -> bool:
        """Begin to pack as much of a push as a slot holds, or write it from the pages, if its heads are all of theirs
        or there is no slot to wait for. False: no slot is free.
        """
        push, first = outstanding.push, outstanding.pages
        if len(heads.source) < self.region.heads and self._pack(outstanding, layers, heads):
            outstanding.until = layers.stop
            return outstanding.slot is not None
        there = self._peers[push.peer][push.key.group]
        ranges = describe_packed(self.region, push.source[first:], there, push.target[first:], layers, heads, slot=None)
        outstanding.pages, outstanding.slot_by = 0, 0.0
        self._write(outstanding, layers, ranges)
        return True

    def _pack(self, outstanding: _Outstanding, layers: range, heads: HeadPart) -> bool:
        """Whether it is being packed, or waits for a slot."""
        assert self.packed is not None, "a push is packed by a transport that packs"
        try:
            outstanding.slot = self.packed.pack(outstanding.push.source[outstanding.pages :], layers, heads.source)
        except TransferError:
            return False
        if outstanding.slot is not None:
            outstanding.slot_by = 0.0
            return True
        outstanding.slot_by = outstanding.slot_by or self.clock.now() + SLOT_WAIT_S
        return self.clock.now() < outstanding.slot_by

    def _write_slot(self, outstanding: _Outstanding) -> bool:
        """Start to write what is packed. False: a device is still packing it, or the push has failed."""
        push, slot = outstanding.push, outstanding.slot
        assert slot is not None, f"push {push.key} has nothing packed"
        assert push.heads is not None, f"push {push.key} is of whole pages"
        if self.clock.now() >= push.start_before:
            self._fail(outstanding, "the grant expired", peer_lost=False)
            return False
        if not slot.filled.query():
            return False
        layers = range(outstanding.layers, outstanding.until)
        first, stop = outstanding.pages, outstanding.pages + slot.pages
        source, target = push.source[first:stop], push.target[first:stop]
        there = self._peers[push.peer][push.key.group]
        ranges = describe_packed(self.region, source, there, target, layers, push.heads, slot=slot.address)
        last = stop == len(push.source)
        self._write(outstanding, layers if last else layers[:0], ranges)
        outstanding.pages = 0 if last else stop
        return True

    def _write(self, outstanding: _Outstanding, layers: range, descriptors: Descriptors) -> None:
        """`layers`: of all pages, once this and what was started before it is written."""
        push = outstanding.push
        here, there = self._region(push), self._peers[push.peer][push.key.group]
        outstanding.began = self.clock.now()
        timeout = STUCK_S + len(push.source) * here.page_bytes / MIN_RATE
        outstanding.give_up = outstanding.began + timeout
        try:
            outstanding.write = self.agent.write(push.peer, descriptors, there.device)
        except TransferError as error:
            self._lose(push.peer, str(error))
            return
        outstanding.layers = layers.stop
        self._began = self.clock.now()
        if layers.stop == here.layers and self.digester.in_background:
            with self.errors.attempt("beginning to digest what is sent", push.peer):
                outstanding.digests = self.digester.begin_sent(push)

    def _finish_write(self, outstanding: _Outstanding) -> bool:
        """Whether the write under way is done, and with the last one the push."""
        assert outstanding.write is not None, f"push {outstanding.push.key} has no write under way"
        try:
            done = self._looked(partial(self.agent.progress, outstanding.write))
        except TransferError as error:
            self._lose(outstanding.push.peer, str(error))
            return False
        if done:
            self._wrote(outstanding)
        elif self.clock.now() >= outstanding.give_up:
            self._lose(outstanding.push.peer, f"a WRITE has not ended in {self.clock.now() - outstanding.began:.0f} s")
        return done

    def _wrote(self, outstanding: _Outstanding) -> None:
        released = self._release(outstanding)
        outstanding.seconds += self.clock.now() - outstanding.began
        if outstanding.layers == self._region(outstanding.push).layers:
            self._finish(outstanding)
        if not released:
            self._lose(outstanding.push.peer, UNEXPECTED)

    def _region(self, push: Push) -> Region:
        """That its group has here."""
        return self.further[push.key.group - 1] if push.key.group else self.region

    def _finish(self, outstanding: _Outstanding) -> bool:
        """End a push that is written. False: a device is still making its digests."""
        push = outstanding.push
        with self.errors.attempt("digesting what was sent", push.peer) as attempt:
            if outstanding.digests is None:
                outstanding.digests = self.digester.begin_sent(push)
            if not outstanding.digests.ready():
                return False
            done = PushDone(key=push.key, digests=outstanding.digests.take(), seconds=outstanding.seconds)
            del self._outstanding[push.key]
            self.outbox.put(done)
        if attempt.failed:
            self._fail(outstanding, "its pages could not be digested", peer_lost=False)
        return True

    def _fail(self, outstanding: _Outstanding, reason: str, *, peer_lost: bool) -> None:
        del self._outstanding[outstanding.push.key]
        self._release(outstanding)
        self.outbox.put(PushFailed(key=outstanding.push.key, reason=reason, peer_lost=peer_lost))

    def _release(self, outstanding: _Outstanding) -> bool:
        """Give the write under way back, which cancels it unless it is done. Idempotent. False: unexpected error."""
        write, outstanding.write = outstanding.write, None
        slot, outstanding.slot = outstanding.slot, None
        peer = outstanding.push.peer
        released = write is None or self._tidy("giving back a write", partial(self.agent.release, write), peer)
        if slot is not None and self.packed is not None:
            self.packed.give_back(slot)
        return released
