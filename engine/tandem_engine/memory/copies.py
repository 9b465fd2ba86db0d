"""Page copies that are on their way, and what must wait for them.

Life of a copy
    1. queued   it has a number; on the executor it runs after all that was launched before
    2. done     somewhen, unnoticed
    3. acked    `poll` found it done, on every rank if there are several: numbers are acked in order

Two kinds of users wait for different things. What runs on the executor (forwards, later copies) never
waits: launch order is enough. What does not (a peer writing over NIXL, a peer's read, the disk) may touch a
page that a copy reads or writes only after the ack [copy-acked] [page-fence]. `CopyFence` keeps such pages apart.

A copy that raises is not survivable: requests were launched on the pages it should have filled. `poll`
raises what it raised, which ends the process.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Generic, TypeAlias, TypeVar

from tandem_engine.memory.page_copy import CopyKind, CopyReport, PageCopy
from tandem_engine.parallel.agreement import Least

Item = TypeVar("Item")

Submit: TypeAlias = Callable[[PageCopy], "Future[CopyReport]"]
"""`ModelExecutor.copy`."""

NANOSECONDS = 1_000_000_000
WEIGHT = 0.2
"""Weight of the newest measurement in the moving mean of a rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Queued:
    number: int
    kind: CopyKind
    future: "Future[CopyReport]"
    acked: Callable[[], None] | None


@dataclass(kw_only=True, slots=True)
class CopyQueue:
    """Queues copies on the executor, in order, and hears of their end. Scheduler thread only."""

    submit: Submit
    least: Least | None = None
    """Of ranks that make the same copies, each of its part of a page. What is done on one may be on its way on
    another, and none may act on it before [copy-acked], nor take it for faster than another does. None: no other
    ranks."""
    launched: int = 0
    """Number of the newest copy that was queued; 0 before the first."""
    acked: int = 0
    """Number of the newest copy known to be done."""
    newest_load: int = 0
    """The newest HOST_TO_DEVICE copy."""
    _in_flight: deque[_Queued] = field(default_factory=deque)
    _pages_per_s: dict[CopyKind, float] = field(default_factory=dict)

    def launch(self, copy: PageCopy, acked: Callable[[], None] | None = None) -> int:
        """Queue `copy`; returns its number. `acked` is called from a later `poll`, when it is done."""
        self.launched += 1
        if copy.kind is CopyKind.HOST_TO_DEVICE:
            self.newest_load = self.launched
        self._in_flight.append(_Queued(number=self.launched, kind=copy.kind, future=self.submit(copy), acked=acked))
        return self.launched

    def passed(self, number: int) -> bool:
        """Whether copy `number` and all before it are acked; true of 0."""
        return number <= self.acked

    @property
    def idle(self) -> bool:
        """Nothing is on its way."""
        return not self._in_flight

    def poll(self) -> bool:
        """Ack what is done. True if anything was. Raises what a copy raised."""
        if not self._in_flight:
            return False
        before = self.acked
        for report in self._done():
            copy = self._in_flight.popleft()
            self._measure(copy.kind, report)
            self.acked = copy.number
            if copy.acked is not None:
                copy.acked()
        return self.acked != before

    def _done(self) -> list[CopyReport]:
        """Reports of the copies that are done, in order, up to the first that is not."""
        done = [copy.future.result() for copy in takewhile(lambda copy: copy.future.done(), self._in_flight)]
        if self.least is None:
            return done
        # As many numbers on every rank, whatever is done on each; and times below zero, so that the longest counts.
        times = [-round(report.seconds * NANOSECONDS) for report in done]
        count, *agreed = self.least([len(done), *times, *[0] * (len(self._in_flight) - len(done))])
        return [
            replace(report, seconds=-time / NANOSECONDS) for report, time in zip(done[:count], agreed, strict=False)
        ]

    def pages_per_s(self, kind: CopyKind) -> float | None:
        """Measured rate; None before the first copy of this kind was acked."""
        return self._pages_per_s.get(kind)

    def _measure(self, kind: CopyKind, report: CopyReport) -> None:
        if report.seconds <= 0.0:
            return
        rate, mean = report.pages / report.seconds, self._pages_per_s.get(kind)
        self._pages_per_s[kind] = rate if mean is None else mean + WEIGHT * (rate - mean)


@dataclass(kw_only=True, slots=True)
class CopyFence(Generic[Item]):
    """Pages nobody owns that a copy in flight may still read or write.

    Which copy touches which page is not kept: a page waits for the newest copy at the time. Copies take
    milliseconds, and only users outside the executor's order notice.
    """

    copies: CopyQueue
    _waiting: deque[tuple[int, Item]] = field(default_factory=deque)
    """By ascending copy number."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Item]:
        return (item for _, item in self._waiting)

    @property
    def needed(self) -> bool:
        """Whether a page that is given back now has to wait."""
        return not self.copies.idle

    def hold(self, items: Iterable[Item]) -> None:
        self._waiting.extend((self.copies.launched, item) for item in items)

    def take(self, at_most: int) -> list[Item]:
        """Items for a user in the executor's order, those that wait longest first."""
        return [self._waiting.popleft()[1] for _ in range(min(at_most, len(self._waiting)))]

    def passed(self) -> list[Item]:
        """Items that no copy touches any more; they leave the fence."""
        passed = []
        while self._waiting and self.copies.passed(self._waiting[0][0]):
            passed.append(self._waiting.popleft()[1])
        return passed
