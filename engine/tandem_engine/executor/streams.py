"""Streams of a device: what is queued on one runs in order, and beside the others but for events.

    schedule   inputs of the next step come to the device while this one computes
    forward    steps, one after the other
    copy       results of a step to the host
    pages      whole pages between device and host memory

    upload     host tensors ─▶ pinned memory ─▶ one copy on `schedule`; `forward` waits for it, the host does not
    download   `copy` waits for `forward`; one event says when everything is in pinned memory

Memory that two streams use is told to the device's allocator (`keep`), which gives it to nobody else before both are
past it. That is the fence behind a step's last read of its inputs: they are its own copy, so nobody need wait for it
to write the next step's [row-snapshot] [no-stream-fence].
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem_engine.forward.kv_progress import Event

ALIGNMENT = 64
"""Of each tensor in an upload: kernels are compiled anew for addresses that are less even than those before."""


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
    """The streams of one device. Called by the scheduler thread; events may be asked by any."""

    @property
    def device(self) -> torch.device: ...

    def on(self, stream: StreamName) -> AbstractContextManager[object]:
        """What is queued inside is queued on `stream`."""
        ...

    def record(self, stream: StreamName, *, timed: bool = False) -> TimedEvent:
        """An event behind all that `stream` has queued."""
        ...

    def wait(self, stream: StreamName, event: Event) -> None:
        """What is queued on `stream` from now on runs after `event`. The host does not wait."""
        ...

    def host_memory(self, size: int) -> Tensor:
        """uint8 [size] that copies to and from the device need nobody to wait for."""
        ...

    def device_memory(self, size: int) -> Tensor:
        """uint8 [size] on the device, of the stream that is `on`."""
        ...

    def keep(self, tensor: Tensor, stream: StreamName) -> None:
        """`stream` uses memory that is another stream's: nobody gets it before `stream` is past this moment."""
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
        """For those who capture what is queued there."""
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
