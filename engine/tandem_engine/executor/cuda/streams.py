"""The executor of a device with streams, and the copies between host and device.

    scheduler thread                         device
    future = executor.launch(batch)   ─────▶ inputs · forward · sampling · results to the host, all queued
    … plans the next step …                  computes
    future.result()                   ◀───── the event after the results; the host reads and assembles them here

Each stream runs its work in order. Streams run concurrently, except where an event orders them:

    schedule   inputs of the next step come to the device while this one computes; `forward` waits for them
    forward    steps, one after the other
    copy       results of a step to pinned host memory; waits for `forward`
    pages      whole pages between device and host memory

There is no executor thread. A launch costs the scheduler thread the queueing and a result the reading, so a future
completes only when that thread polls it.

Memory that two streams use is registered with the device's allocator (`keep`), which reuses it only after both streams
are past it. A step reads its own copy of its inputs, so the host may write those of the next step at once
[row-snapshot] [no-stream-fence].

Page copies keep the order of the calls, as `memory.page_copies` requires [page-fence]. A copy waits for the steps
launched before, and a step waits for a copy only if it uses one of its pages. Each run of adjacent pages is one command
to a copy engine, which needs no multiprocessor. Where runs are so short that their commands would take longer than
their bytes, one kernel copies all of them (ADR 46).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from math import prod
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from tandem_engine.forward.batch import ForwardBatch, ForwardResult
from tandem_engine.forward.kv_progress import Event
from tandem_engine.kernels.interface import by_triton
from tandem_engine.memory.page_copies import CopyKind, CopyReport, PageCopy, Pages, copy_state, parts_of_state

ALIGNMENT = 64
"""Of each tensor in an upload: kernels are compiled again for addresses with a smaller alignment."""


class StreamName(Enum):
    SCHEDULE = "schedule"
    FORWARD = "forward"
    COPY = "copy"
    PAGES = "pages"


class TimedEvent(Event, Protocol):
    """`torch.cuda.Event`, recorded."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from here to `end_event`. Both were recorded `timed`, and reached."""
        ...


class DeviceStreams(Protocol):
    """The streams of one device. Called by the scheduler thread; any thread may query events."""

    @property
    def device(self) -> torch.device: ...

    def on(self, stream: StreamName) -> AbstractContextManager[object]:
        """What is queued inside is queued on `stream`."""
        ...

    def record(self, stream: StreamName, *, timed: bool = False) -> TimedEvent:
        """An event after everything that `stream` has queued."""
        ...

    def wait(self, stream: StreamName, event: Event) -> None:
        """What is queued on `stream` from now on runs after `event`. The host does not wait."""
        ...

    def host_memory(self, size: int) -> Tensor:
        """uint8 [size] of pinned memory: copies to and from the device do not block the host."""
        ...

    def device_memory(self, size: int) -> Tensor:
        """uint8 [size] on the device, of the stream that is `on`."""
        ...

    def keep(self, tensor: Tensor, stream: StreamName) -> None:
        """`stream` uses memory of another stream: it is not reused before `stream` is past this moment."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done all that is queued. Not while steps are served."""
        ...


class CudaStreams:
    """Implements `DeviceStreams` for a GPU."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda", f"{device} has no CUDA streams"
        self.device = device
        self._streams: dict[StreamName, torch.cuda.Stream] = {}
        for name in StreamName:
            self._streams[name] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def on(self, stream: StreamName) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = torch.cuda.stream(self._streams[stream])
        return context

    def record(self, stream: StreamName, *, timed: bool = False) -> TimedEvent:
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record(self._streams[stream])
        return event

    def wait(self, stream: StreamName, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event), f"{type(event).__name__} is no event of a GPU"
        self._streams[stream].wait_event(event)

    def host_memory(self, size: int) -> Tensor:
        # Pinned by the context of the current device, which need not be this one.
        with torch.cuda.device(self.device):
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def device_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def keep(self, tensor: Tensor, stream: StreamName) -> None:
        tensor.record_stream(self._streams[stream])

    def stream(self, name: StreamName) -> torch.cuda.Stream:
        """For callers that capture what is queued there."""
        return self._streams[name]

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


def upload(streams: DeviceStreams, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of host `tensors` on the device, for what is queued on `forward` from now on."""
    if not tensors:
        return []
    starts = _starts(tensors)
    packed = streams.host_memory(starts[-1])
    _fill(packed, tensors, starts)
    with streams.on(StreamName.SCHEDULE):
        arrived = streams.device_memory(starts[-1])
        arrived.copy_(packed, non_blocking=True)
    streams.keep(arrived, StreamName.FORWARD)
    streams.wait(StreamName.FORWARD, streams.record(StreamName.SCHEDULE))
    return _views(arrived, tensors, starts)


@dataclass(frozen=True, slots=True)
class Download:
    """Copies of tensors that are on their way to the host."""

    tensors: list[Tensor]
    """On the host. They mean nothing before `arrived`."""
    event: Event
    sources: tuple[Tensor, ...]
    """Kept as long as they are read."""

    def arrived(self) -> bool:
        """Whether they are there. Raises what the device raised."""
        return self.event.query()


def download(streams: DeviceStreams, tensors: Sequence[Tensor]) -> Download:
    """Queue copies of device `tensors`, as they are once `forward` has done what it has queued."""
    streams.wait(StreamName.COPY, streams.record(StreamName.FORWARD))
    starts = _starts(tensors)
    copies = _views(streams.host_memory(starts[-1]), tensors, starts)
    with streams.on(StreamName.COPY):
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
    return Download(tensors=copies, event=streams.record(StreamName.COPY), sources=tuple(tensors))


def _starts(tensors: Sequence[Tensor]) -> list[int]:
    """Where each begins in one piece of memory, and the size of that."""
    sizes = (-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)
    return [*accumulate(sizes, initial=0)]


def _fill(packed: Tensor, tensors: Sequence[Tensor], starts: Sequence[int]) -> None:
    memory = packed.numpy()
    for tensor, start in zip(tensors, starts, strict=False):
        values = tensor.contiguous().numpy()
        memory[start : start + values.nbytes] = values.reshape(-1).view("u1")


def _views(memory: Tensor, like: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    """Dense tensors of the shapes and dtypes of `like` in `memory`."""
    return [
        memory[start : start + prod(tensor.shape) * tensor.itemsize].view(tensor.dtype).view(tensor.shape)
        for tensor, start in zip(like, starts, strict=False)
    ]


T = TypeVar("T")

SPIN_S = 0.002
"""For so long a look follows the other at once: small steps end sooner than a sleeping thread is awake again."""

NAP_S = 50e-6


@dataclass(frozen=True, slots=True)
class Queued(Generic[T]):
    """Something that is queued on a device."""

    arrived: Callable[[], bool]
    """Whether its results are on the host. Never waits; raises what the device raised."""
    finish: Callable[[], T]
    """The answer, once they are."""

    def then(self, change: Callable[[T], T]) -> "Queued[T]":
        """With its answer changed on the host."""
        return Queued(self.arrived, lambda: change(self.finish()))


Enqueue = Callable[[ForwardBatch], Queued[ForwardResult]]
"""Queues a step. Where it raises, nothing that was queued has a result."""

EnqueueCopy = Callable[[PageCopy], Queued[CopyReport]]


class StreamFuture(Future[T]):
    """A future that looks for itself. Scheduler thread only."""

    def __init__(self, queued: Queued[T]) -> None:
        super().__init__()
        self._queued = queued

    def done(self) -> bool:
        return super().done() or self._arrived()

    def result(self, timeout: float | None = None) -> T:
        self._complete(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._complete(timeout)
        return super().exception(0)

    def _arrived(self) -> bool:
        """Also when the device has failed: then there is nothing more to come."""
        try:
            return self._queued.arrived()
        except Exception as error:  # noqa: BLE001 - the boundary: `result` raises it
            self.set_exception(error)
            return True

    def _complete(self, timeout: float | None) -> None:
        """Raises `TimeoutError` when it takes longer."""
        if super().done():
            return
        self._await(timeout)
        if super().done():
            return
        try:
            answer = self._queued.finish()
        except Exception as error:  # noqa: BLE001 - as above
            self.set_exception(error)
        else:
            self.set_result(answer)

    def _await(self, timeout: float | None) -> None:
        began = time.monotonic()
        while not self._arrived():
            waited = time.monotonic() - began
            if timeout is not None and waited >= timeout:
                raise TimeoutError
            time.sleep(0.0 if waited < SPIN_S else NAP_S)


class StreamExecutor:
    """Implements `ModelExecutor`. Both modes: overlap is what the loop makes of it."""

    def __init__(self, enqueue: Enqueue, *, copier: EnqueueCopy, streams: DeviceStreams) -> None:
        self._enqueue = enqueue
        self._copier = copier
        self._streams = streams
        self._closed = False

    def launch(self, batch: ForwardBatch) -> Future[ForwardResult]:
        """Raises `RuntimeError` after `shutdown`."""
        self._require_open()
        return _future(lambda: self._enqueue(batch))

    def copy(self, copy: PageCopy) -> Future[CopyReport]:
        """Raises `RuntimeError` after `shutdown`."""
        self._require_open()
        return _future(lambda: self._copier(copy))

    def run(self, function: Callable[[], T]) -> T:
        """Run `function` with the forward stream on, after what was launched. It may wait for the device."""
        with self._streams.on(StreamName.FORWARD):
            return function()

    def shutdown(self) -> None:
        """Wait for what was launched."""
        if not self._closed:
            self._closed = True
            self._streams.synchronize()

    def abandon(self) -> None:
        """Launch nothing more, and do not wait for a step that may never end."""
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the executor is shut down")


def _future(enqueue: Callable[[], Queued[T]]) -> Future[T]:
    try:
        # Grad mode belongs to a thread, and the scheduler's may be a caller's own.
        with torch.inference_mode():
            return StreamFuture(enqueue())
    except Exception as error:  # noqa: BLE001 - the boundary: `result()` raises it, as on a thread
        failed: Future[T] = Future()
        failed.set_exception(error)
        return failed


MILLISECOND = 1e-3

SHORT_RUN = 128 << 10
"""Bytes: a bus moves them in the 2 to 3 µs that a command to a copy engine takes."""

Run = tuple[int, int, int]
"""First source, first target and number of pages that follow each other in both."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A copy between device and host."""

    pages: frozenset[int]
    """Of the device."""
    event: Event
    """Behind it."""
    rows: frozenset[int] = frozenset()
    """Whose states it copies."""


class PageStreams:
    """Copies of pages between a pool on a device and, if there is one, pinned host memory. Scheduler thread only."""

    def __init__(
        self, streams: DeviceStreams, device: Pages, host: Pages | None = None, states: Pages | None = None
    ) -> None:
        self._streams = streams
        self._states = None if states is None else states.bytes_view()
        self._device = device.bytes_view()
        self._host = None if host is None else host.bytes_view()
        self._has_kernels = by_triton(self._device.device)
        if self._has_kernels and self._host is not None and self._host.shape[1] < SHORT_RUN:
            self._warm_up()
        self._in_flight: list[InFlight] = []

    def enqueue(self, copy: PageCopy) -> Queued[CopyReport]:
        """Queue `copy` after everything that was queued before."""
        self._streams.wait(StreamName.PAGES, self._streams.record(StreamName.FORWARD))
        began = self._streams.record(StreamName.PAGES, timed=True)
        with self._streams.on(StreamName.PAGES):
            if copy.kind.is_of_state:
                pages, rows = frozenset[int](), self._copy_state(copy)
            else:
                pages, rows = self._copy_pages(copy), frozenset[int]()
        ended = self._streams.record(StreamName.PAGES, timed=True)
        self._in_flight.append(InFlight(pages, ended, rows))

        def report() -> CopyReport:
            return CopyReport(pages=len(copy.source), seconds=began.elapsed_time(ended) * MILLISECOND)

        return Queued(ended.query, report)

    def _copy_pages(self, copy: PageCopy) -> frozenset[int]:
        """Returns the pages on the device."""
        source, target = self._ends(copy.kind)
        runs = [*runs_of(copy)]
        if self._has_kernels and are_short(runs, page_bytes=source.shape[1]):
            self._gather(source, target, copy)
        else:
            _copy_runs(source, target, runs)
        return frozenset(copy.target if copy.kind.is_load else copy.source)

    def _copy_state(self, copy: PageCopy) -> frozenset[int]:
        """Returns the rows."""
        assert self._states is not None, f"{copy.kind.value} of a model without states"
        assert self._host is not None, f"{copy.kind.value} without host pages"
        copy_state(copy, self._states, self._host)
        parts = parts_of_state(self._states.shape[1], self._host.shape[1])
        return frozenset(number // parts for number in (copy.target if copy.kind.is_load else copy.source))

    def _warm_up(self) -> None:
        """Compile the copy kernels before requests need them, with unused pages: the dummy one, the host's first."""
        with self._streams.on(StreamName.PAGES):
            copy = PageCopy(kind=CopyKind.DEVICE_TO_HOST, source=[0], target=[0])
            self._gather(*self._ends(copy.kind), copy)

    def _gather(self, source: Tensor, target: Tensor, copy: PageCopy) -> None:
        # Only an engine on a device needs Triton.
        from tandem_engine.kernels.triton.page_copy import gather_pages

        indices = np.array((copy.source, copy.target), dtype=np.int64)
        on_host = self._streams.host_memory(indices.nbytes)
        on_host.numpy().view(np.int64)[:] = indices.reshape(-1)
        there = self._streams.device_memory(indices.nbytes)
        there.copy_(on_host, non_blocking=True)
        gather_pages(source, target, *there.view(torch.int64).view(indices.shape).unbind(0))

    def before(self, batch: ForwardBatch) -> None:
        """Have the forward stream wait for copies of pages and states that `batch`, on the host, names."""
        if self._in_flight:
            copied = (page for pair in batch.page_copies for page in pair)
            self._wait_for({*np.unique(batch.page_table.numpy()).tolist(), *copied}, {*batch.rows.tolist()})

    def _wait_for(self, pages: set[int], rows: set[int]) -> None:
        """Have the forward stream wait for copies of any of `pages` and of states of `rows`."""
        self._in_flight = [copy for copy in self._in_flight if not copy.event.query()]
        for copy in self._in_flight:
            if not (copy.pages.isdisjoint(pages) and copy.rows.isdisjoint(rows)):
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
