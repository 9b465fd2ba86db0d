"""Copies of whole pages on a stream of their own, beside the steps and yet in order with them.

    to host     `pages` waits for the steps launched before, whose bytes it reads
    to device   the same: a step launched before may still write a page that is given out again [page-fence]
    a step      waits for a copy only if it names one of its pages, be it to read what came or to write what goes

So the order is that of the calls, as `memory.page_copy` promises, and a step of other requests computes meanwhile.

A page is one run of bytes, megabytes of a large model, and pages that follow each other on both sides are one run, too.
So each run is one command to a copy engine, which needs no multiprocessor and no second copy of the pages. Where runs
are so short that their commands would take longer than their bytes, one kernel moves all of them (ADR 46).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem_engine.executor.stream_executor import Queued
from tandem_engine.executor.streams import DeviceStreams, StreamName
from tandem_engine.forward.forward_batch import ForwardBatch
from tandem_engine.forward.kv_progress import Event
from tandem_engine.kernels.dispatch import by_triton
from tandem_engine.memory.page_copy import CopyKind, CopyReport, PageCopy, Pages

MILLISECOND = 1e-3
SHORT_RUN = 128 << 10
"""Bytes: a bus moves them in the 2 to 3 µs that a command to a copy engine takes beside."""

Run = tuple[int, int, int]
"""First source, first target and number of pages that follow each other in both."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A copy between device and host."""

    pages: frozenset[int]
    """Of the device."""
    event: Event
    """Behind it."""


class PageStreams:
    """Copies of pages between a pool on a device and, if there is one, pinned host memory. Scheduler thread only."""

    def __init__(self, streams: DeviceStreams, device: Pages, host: Pages | None = None) -> None:
        self._streams = streams
        self._device = device.bytes_view()
        self._host = None if host is None else host.bytes_view()
        self._has_kernels = by_triton(self._device.device)
        if self._has_kernels and self._host is not None and self._host.shape[1] < SHORT_RUN:
            self._warm_up()
        self._in_flight: list[InFlight] = []

    def enqueue(self, copy: PageCopy) -> Queued[CopyReport]:
        """Queue `copy` behind all that was queued before."""
        self._streams.wait(StreamName.PAGES, self._streams.record(StreamName.FORWARD))
        began = self._streams.record(StreamName.PAGES, timed=True)
        source, target = self._ends(copy.kind)
        with self._streams.on(StreamName.PAGES):
            runs = [*runs_of(copy)]
            if self._has_kernels and are_short(runs, page_bytes=source.shape[1]):
                self._gather(source, target, copy)
            else:
                _copy_runs(source, target, runs)
        ended = self._streams.record(StreamName.PAGES, timed=True)
        on_device = copy.source if copy.kind is CopyKind.DEVICE_TO_HOST else copy.target
        self._in_flight.append(InFlight(frozenset(on_device), ended))

        def report() -> CopyReport:
            return CopyReport(pages=len(copy.source), seconds=began.elapsed_time(ended) * MILLISECOND)

        return Queued(ended.query, report)

    def _warm_up(self) -> None:
        """Compile what no request should wait for, with pages that nobody has: the dummy one, the first of the host."""
        with self._streams.on(StreamName.PAGES):
            copy = PageCopy(kind=CopyKind.DEVICE_TO_HOST, source=[0], target=[0])
            self._gather(*self._ends(copy.kind), copy)

    def _gather(self, source: Tensor, target: Tensor, copy: PageCopy) -> None:
        # Only an engine on a device needs Triton.
        from tandem_engine.kernels.page_gather import gather_pages

        indices = np.array((copy.source, copy.target), dtype=np.int64)
        on_host = self._streams.host_memory(indices.nbytes)
        on_host.numpy().view(np.int64)[:] = indices.reshape(-1)
        there = self._streams.device_memory(indices.nbytes)
        there.copy_(on_host, non_blocking=True)
        gather_pages(source, target, *there.view(torch.int64).view(indices.shape).unbind(0))

    def before(self, batch: ForwardBatch) -> None:
        """Have the forward stream wait for copies of pages that `batch`, on the host, names."""
        if self._in_flight:
            copied = (page for pair in batch.page_copies for page in pair)
            self._wait_for({*np.unique(batch.page_table.numpy()).tolist(), *copied})

    def _wait_for(self, pages: set[int]) -> None:
        """Have the forward stream wait for copies of any of `pages`."""
        self._in_flight = [copy for copy in self._in_flight if not copy.event.query()]
        for copy in self._in_flight:
            if not copy.pages.isdisjoint(pages):
                self._streams.wait(StreamName.FORWARD, copy.event)

    def _ends(self, kind: CopyKind) -> tuple[Tensor, Tensor]:
        assert self._host is not None, f"{kind.value} without host pages"
        return (self._device, self._host) if kind is CopyKind.DEVICE_TO_HOST else (self._host, self._device)


def are_short(runs: Sequence[Run], *, page_bytes: int) -> bool:
    """Whether commands to copy engines would take longer than what they move."""
    return len(runs) > 1 and sum(count for _, _, count in runs) * page_bytes < len(runs) * SHORT_RUN


def _copy_runs(source: Tensor, target: Tensor, runs: Sequence[Run]) -> None:
    for origin, destination, count in runs:
        target[destination : destination + count].copy_(source[origin : origin + count], non_blocking=True)


def runs_of(copy: PageCopy) -> Iterator[Run]:
    """In the order of `copy`."""
    start, pages = 0, len(copy.source)
    for index in range(1, pages + 1):
        if index < pages and _follows(copy.source, index) and _follows(copy.target, index):
            continue
        yield copy.source[start], copy.target[start], index - start
        start = index


def _follows(pages: Sequence[int], index: int) -> bool:
    return pages[index] == pages[index - 1] + 1
