"""Copies of whole pages, in launch order with the forwards, and the fence for everything outside that order.

    scheduler thread                      forward thread (CPU) or stream (GPU)
    executor.copy(a)     ──────────────▶  page copy a
    executor.launch(N)   ──────────────▶  forward N: reads what a copied
    executor.copy(b)     ──────────────▶  page copy b: reads what N wrote

So a load-back that is queued before a launch is visible to it, and a backup that is queued after the step that wrote a
page has its final bytes, without any wait.

    1. queued   the copy has a number; on the executor it runs after everything that was launched before
    2. done     at some later time
    3. acked    `poll` found it done, on every rank if there are several: numbers are acked in order

Work on the executor (forwards, later copies) never waits: launch order is enough. Everything else (a peer that writes
over NIXL, a peer's read, the disk) may touch a page that a copy reads or writes only after the ack [copy-acked]
[page-fence]. `CopyFence` withholds such pages.

A state (`state_pool`) goes to host pages as parts of a page's size, the last one shorter. Part p of the state in slot s
has number s · (parts of a state) + p.

A failed copy is fatal: requests were launched on the pages that it should have filled. `poll` re-raises its exception,
which ends the process.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import takewhile
from time import perf_counter
from typing import Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from tandem_engine.parallel.agreement import Least


class CopyKind(Enum):
    """From where to where."""

    DEVICE_TO_HOST = "device_to_host"
    HOST_TO_DEVICE = "host_to_device"
    STATE_TO_HOST = "state_to_host"
    HOST_TO_STATE = "host_to_state"

    @property
    def is_of_state(self) -> bool:
        return self in (CopyKind.STATE_TO_HOST, CopyKind.HOST_TO_STATE)

    @property
    def is_load(self) -> bool:
        """To the device."""
        return self in (CopyKind.HOST_TO_DEVICE, CopyKind.HOST_TO_STATE)


def parts_of_state(state_bytes: int, page_bytes: int) -> int:
    """Host pages of `page_bytes` that hold a state."""
    return -(-state_bytes // page_bytes)


def copy_state(copy: "PageCopy", states: torch.Tensor, host: torch.Tensor) -> None:
    """Carry out a `copy` of states between uint8 [slots, state_bytes] and uint8 [pages, page_bytes]."""
    page_bytes = host.shape[1]
    parts = parts_of_state(states.shape[1], page_bytes)
    on_device, pages = (copy.target, copy.source) if copy.kind.is_load else (copy.source, copy.target)
    for number, page in zip(on_device, pages, strict=True):
        slot, part = divmod(number, parts)
        here = states[slot, part * page_bytes : (part + 1) * page_bytes]
        there = host[page, : len(here)]
        source, target = (there, here) if copy.kind.is_load else (here, there)
        target.copy_(source, non_blocking=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageCopy:
    """Copy page `source[i]` to page `target[i]`, one after the other in this order."""

    kind: CopyKind
    source: Sequence[int]
    target: Sequence[int]

    def __post_init__(self) -> None:
        assert len(self.source) == len(self.target), f"{len(self.source)} pages into {len(self.target)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyReport:
    """What a copy took, where it ran."""

    pages: int
    seconds: float


Copier: TypeAlias = Callable[[PageCopy], CopyReport]
"""Performs a copy. Called only where forwards run."""


class Pages(Protocol):
    """Memory that is cut into pages of one size."""

    def bytes_view(self) -> torch.Tensor:
        """The bytes of all pages: uint8 [num_pages, page_bytes], a view."""
        ...


class PageCopier:
    """A `Copier` between a KV pool, or states, and host pages if there are any. All in the memory of this machine's
    CPU."""

    def __init__(self, device: Pages, host: Pages | None = None, states: Pages | None = None) -> None:
        self._states = None if states is None or host is None else (states.bytes_view(), host.bytes_view())
        self._ends: dict[CopyKind, tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]] = {}
        if host is not None:
            pages, mirror = device.bytes_view().numpy(), host.bytes_view().numpy()
            self._ends[CopyKind.DEVICE_TO_HOST] = (pages, mirror)
            self._ends[CopyKind.HOST_TO_DEVICE] = (mirror, pages)

    def __call__(self, copy: PageCopy) -> CopyReport:
        """Raises KeyError without host pages."""
        began = perf_counter()
        if copy.kind.is_of_state:
            assert self._states is not None, f"{copy.kind.value} of a model without states, or without host pages"
            copy_state(copy, *self._states)
            return CopyReport(pages=len(copy.source), seconds=perf_counter() - began)
        source, target = self._ends[copy.kind]
        # Row by row through numpy is a memcpy per page without the interpreter lock; gathering and scattering
        # with torch moves every byte twice and took three to fifty times as long for pages of 6 KiB to 2 MiB.
        for origin, destination in zip(copy.source, copy.target, strict=True):
            target[destination] = source[origin]
        return CopyReport(pages=len(copy.source), seconds=perf_counter() - began)


def refuse_copies(copy: PageCopy) -> CopyReport:
    """The `Copier` of an executor that was given none."""
    raise AssertionError(f"this executor has no copier and cannot execute {copy.kind.value}")


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
    """Queues copies on the executor, in order, and tracks their completion. Scheduler thread only."""

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
    """The newest copy to the device, of pages or of a state."""
    newest_of_state: int = 0
    """The newest copy of a state, either way: a peer must not write to the slot of an anchor before it is acked
    [page-fence]."""
    newest_of_row: int = 0
    """The same of those that may touch the state of a row, which backups of anchors do not."""
    _in_flight: deque[_Queued] = field(default_factory=deque)
    _pages_per_s: dict[CopyKind, float] = field(default_factory=dict)

    def launch(self, copy: PageCopy, acked: Callable[[], None] | None = None, *, of_anchors: bool = False) -> int:
        """Queue `copy`; returns its number. `acked` is called from a later `poll`, when it is done.

        `of_anchors`: its states are those of anchors, so it touches no row.
        """
        self.launched += 1
        if copy.kind.is_load:
            self.newest_load = self.launched
        if copy.kind.is_of_state:
            self.newest_of_state = self.launched
            if not of_anchors:
                self.newest_of_row = self.launched
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
    """Pages without an owner that a copy in flight may still read or write.

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
