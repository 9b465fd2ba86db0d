"""Holds: memory of the receiving engine that a peer may still write to.

    1. granted      the request has pages; the write grant is on its way to the writer
    2. receiving    the writer has reported that it has written some of them
    3. committed    it has written all and every digest matched; the hold is over, the request owns the pages
    4. draining     the transfer ended early; the pages left the request and wait for the writer's ack
    5. quarantined  no ack in time; the pages wait until the writer acks after all or is fenced
    6. fenced       the writer counts as dead. A writer that was stopped during a write continues it when it is
                    resumed, so the pages wait until its process has ended

                                                          ┌──── ack ────▶ pages free
    granted ──▶ receiving ──▶ committed                   │
       └────────────┴─────── drain ──▶ draining ──────────┤
                                          └─ deadline ─▶ quarantined ── ack ──▶ pages free
                                       either ── fence ──▶ fenced ── ack, end ──▶ pages free

Only commit, an ack or the end of the writer's process releases pages, so a late write never lands in another request's
page [late-write]. Pages that this engine unpacks (`packed_pages`) wait for the end of that, too.
Deadlines are monotonic seconds. An ack counts only from the writer that was granted the pages, in
the generation of the grant [ack-per-grant]; any other signal about a hold that is over is ignored
[late-signal-ignored].
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from tandem_engine.base.clock import Clock
from tandem_engine.base.names import PageId, ReqPoolIdx
from tandem_engine.disaggregation.base import RoomKey
from tandem_engine.messages.requests import Peer

FENCED_AT_MAX_S = 600.0
"""Seconds after which a fenced writer's pages are reused although it is unknown whether its process has ended."""

GiveBack = Callable[[Sequence[PageId]], None]
"""Takes pages that no writer will write to any more."""

GiveBackRow = Callable[[ReqPoolIdx], None]
"""The same of the row of a request, whose state the writer has written."""


def no_rows(row: ReqPoolIdx) -> None:
    """Of transfers of pages alone."""
    raise AssertionError(f"a hold of pages alone has row {row}")


class HoldState(Enum):
    GRANTED = "granted"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    FENCED = "fenced"

    @property
    def owns_pages(self) -> bool:
        """Whether the pages are the hold's own; before and after they are the request's."""
        return self in (HoldState.DRAINING, HoldState.QUARANTINED, HoldState.FENCED)


SHUT = (HoldState.QUARANTINED, HoldState.FENCED)
"""Of holds that wait for as long as it takes."""


@dataclass(kw_only=True, slots=True)
class TransferHold:
    """Pages promised to one writer for one attempt at one request."""

    key: RoomKey
    writer: Peer
    pages: tuple[PageId, ...]
    granted_at: float
    deadline: float
    """Of the writer's next sign of life while the transfer lasts, then of the ack."""
    state: HoldState = HoldState.GRANTED
    written: int = 0
    """Pages that hold their final bytes, as far as the writer has reported."""
    row: ReqPoolIdx | None = None
    """Whose state the writer may write, too. Like the pages, it is the hold's own once the request has given it up.
    Of a prefix it is the slot of an anchor."""
    unpacking: bool = False
    """The transport of this engine may be writing to the pages, too."""
    left: bool = False
    """By the writer, while they are unpacked."""

    @property
    def states(self) -> tuple[PageId, ...]:
        """Slots of states that are granted with the pages."""
        return () if self.row is None else (PageId(self.row),)

    @property
    def complete(self) -> bool:
        return self.written == len(self.pages)


@dataclass(kw_only=True, slots=True)
class HoldTable:
    """All holds of an engine. Scheduler thread only."""

    clock: Clock
    give_back: GiveBack
    drain_timeout: float
    give_back_row: GiveBackRow = no_rows
    _holds: dict[RoomKey, TransferHold] = field(default_factory=dict)

    def __contains__(self, key: RoomKey) -> bool:
        return key in self._holds

    def get(self, key: RoomKey) -> TransferHold | None:
        return self._holds.get(key)

    def grant(
        self,
        key: RoomKey,
        *,
        writer: Peer,
        pages: tuple[PageId, ...],
        valid_s: float,
        row: ReqPoolIdx | None = None,
    ) -> TransferHold:
        """Begin a hold. The room must have none: a second attempt has another generation."""
        assert key not in self._holds, f"room {key} has a hold already, {self._holds[key].state.value}"
        assert pages, f"room {key} was granted no pages"
        now = self.clock.now()
        hold = TransferHold(key=key, writer=writer, pages=pages, granted_at=now, deadline=now + valid_s, row=row)
        self._holds[key] = hold
        return hold

    def wrote(self, key: RoomKey, *, writer: str, pages: int) -> bool:
        """The writer has written so many pages. False: not a live hold's, or nothing new [writes-repeat]."""
        hold = self._live(key, writer)
        if hold is None or not hold.written < pages <= len(hold.pages):
            return False
        hold.state = HoldState.RECEIVING
        hold.written = pages
        return True

    def renew(self, key: RoomKey, *, writer: str, valid_s: float) -> bool:
        """The writer continues: wait for `valid_s` from now. False: not a live hold's, and it stays as it is."""
        hold = self._live(key, writer)
        if hold is None:
            return False
        hold.deadline = max(hold.deadline, self.clock.now() + valid_s)
        return True

    def shorten(self, key: RoomKey, keep: int) -> None:
        """The writer has written the first `keep` pages and will write no more: the others are free.

        With none left the hold is over.
        """
        hold = self._holds[key]
        assert not hold.state.owns_pages, f"room {key} shortened while {hold.state.value}"
        hold.pages, rest = hold.pages[:keep], hold.pages[keep:]
        hold.written = min(hold.written, keep)
        if not hold.pages:
            del self._holds[key]
            if hold.row is not None:
                self.give_back_row(hold.row)
        self.give_back(rest)

    def unpack(self, key: RoomKey) -> None:
        """The transport was asked to unpack the pages: nothing frees them before `unpacked` [late-write]."""
        self._holds[key].unpacking = True

    def unpacked(self, key: RoomKey) -> bool:
        """The transport has answered, and writes to the pages no more. True: the transfer had ended before."""
        hold = self._holds.get(key)
        if hold is None or not hold.unpacking:
            return False
        hold.unpacking = False
        if hold.left:
            self._free(hold)
        return hold.state.owns_pages

    def commit(self, key: RoomKey) -> None:
        """Everything arrived and was verified: the hold is over, its pages are the request's."""
        hold = self._holds.pop(key)
        assert hold.complete, f"room {key} committed with {hold.written} of {len(hold.pages)} pages"
        assert not hold.state.owns_pages, f"room {key} committed while {hold.state.value}"
        hold.state = HoldState.COMMITTED

    def drain(self, key: RoomKey, pages: Sequence[PageId]) -> None:
        """The transfer ended early: take `pages`, which the request has given up, until it is safe."""
        hold = self._holds[key]
        assert not hold.state.owns_pages, f"room {key} drained twice, it is {hold.state.value}"
        assert tuple(pages) == hold.pages, f"room {key} granted {hold.pages}, the request gave up {pages}"
        hold.state = HoldState.DRAINING
        hold.deadline = self.clock.now() + self.drain_timeout

    def acked(self, key: RoomKey, *, writer: str) -> bool:
        """The writer will not touch the pages again. False: no hold was waiting for this ack."""
        hold = self._holds.get(key)
        if hold is None or not hold.state.owns_pages or hold.writer.incarnation != writer:
            return False
        self._free(hold)
        return True

    def fence(self, incarnation: str) -> None:
        """The writer counts as dead and gets no more questions. Its pages wait for the end of its process."""
        for hold in self._with_pages():
            if hold.writer.incarnation == incarnation and hold.state is not HoldState.FENCED:
                hold.state = HoldState.FENCED
                hold.deadline = self.clock.now() + FENCED_AT_MAX_S

    def ended(self, incarnation: str) -> int:
        """The writer's process has ended: free what waited for it. Returns the number of holds that were freed."""
        over = [hold for hold in self._with_pages() if hold.writer.incarnation == incarnation]
        for hold in over:
            self._free(hold)
        return len(over)

    def overdue(self) -> list[TransferHold]:
        """Holds past their deadline, in whatever state. Changes nothing."""
        now = self.clock.now()
        return [hold for hold in self._holds.values() if now >= hold.deadline]

    def quarantine(self, hold: TransferHold) -> None:
        """The ack of `hold` is overdue. Also renews the time after which the writer is asked again."""
        waits = hold.state in (HoldState.DRAINING, HoldState.QUARANTINED)
        assert waits, f"room {hold.key} quarantined while {hold.state.value}"
        hold.state = HoldState.QUARANTINED
        hold.deadline = self.clock.now() + self.drain_timeout

    def open_transfers(self) -> int:
        """Holds whose writers are waited for: all but the quarantined and the fenced."""
        return sum(hold.state not in SHUT for hold in self._holds.values())

    def held_pages(self) -> Iterator[PageId]:
        """Pages that belong to a hold and to no request (audit)."""
        return (page for hold in self._with_pages() for page in hold.pages)

    def held_rows(self) -> Iterator[ReqPoolIdx]:
        """Rows that belong to a hold and to no request (audit)."""
        return (hold.row for hold in self._with_pages() if hold.row is not None)

    def quarantined_pages(self) -> int:
        """Those of fenced writers, too."""
        return sum(len(hold.pages) for hold in self._holds.values() if hold.state in SHUT)

    def quarantined_for(self) -> tuple[str, ...]:
        """The writers of quarantined holds, each once."""
        quarantined = (hold for hold in self._holds.values() if hold.state is HoldState.QUARANTINED)
        return tuple(dict.fromkeys(hold.writer.incarnation for hold in quarantined))

    def fenced_writers(self) -> Iterator[Peer]:
        """Those whose end is waited for, once for each hold."""
        return (hold.writer for hold in self._holds.values() if hold.state is HoldState.FENCED)

    def _live(self, key: RoomKey, writer: str) -> TransferHold | None:
        """The hold of a transfer from `writer` that has not ended."""
        hold = self._holds.get(key)
        live = hold is not None and not hold.state.owns_pages and hold.writer.incarnation == writer
        return hold if live else None

    def _with_pages(self) -> Iterator[TransferHold]:
        return (hold for hold in self._holds.values() if hold.state.owns_pages)

    def _free(self, hold: TransferHold) -> None:
        if hold.unpacking:
            hold.left = True
            return
        del self._holds[hold.key]
        self.give_back(hold.pages)
        if hold.row is not None:
            self.give_back_row(hold.row)
