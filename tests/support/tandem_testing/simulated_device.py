"""A CPU that behaves like a device with streams, as far as its rules can be checked.

    residence   a tensor is on the device, pinned or plainly on the host: by how it was made. An operation on a stream
                that mixes device and host raises, as CUDA does, and so does a pageable copy, which would wait
    waiting     whatever makes the host wait for the device raises: item, tolist, numpy, bool, nonzero, unique,
                boolean masks, repeat_interleave without a size [no-device-wait]
    order       streams have vector clocks. What one stream writes another may touch only behind an event that both
                know of; else it raises
    lateness    copies to the host are made when a reader must have seen them: the host, by an event behind them, or
                another stream. Until then there is garbage. Events are reached only after some looks

Everything is computed at once and in the order of the calls, so numbers are right whenever these rules are kept.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tandem_engine.executor.cuda.streams import StreamName
from tandem_testing.torch_operators import resolve_operators

resolve_operators()

ATEN = torch.ops.aten
GARBAGE = 0x5B
SIZED_BY_VALUES = {
    ATEN._local_scalar_dense.default: "a number is taken to the host",
    ATEN.nonzero.default: "nonzero",
    ATEN.masked_select.default: "masked_select",
    ATEN._unique2.default: "unique",
    ATEN.unique_consecutive.default: "unique_consecutive",
    ATEN.bincount.default: "bincount",
    ATEN.equal.default: "equal",
    ATEN.repeat_interleave.Tensor: "repeat_interleave",
}
INDEXED = {ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default}
TO_HOST = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.__float__,
    Tensor.__index__, Tensor.__array__,
}  # fmt: skip
FACTORIES = {torch.arange, torch.zeros, torch.ones, torch.full, torch.empty}
FROM_LISTS = {torch.tensor, torch.as_tensor}
HOST = "host"

Clock = dict[str, int]


class HostWaitError(AssertionError):
    """The host would wait for the device."""


class MixedDevicesError(AssertionError):
    """An operation on tensors of the device and of the host."""


class UnorderedError(AssertionError):
    """Two streams touch the same memory, and nothing says which comes first."""


@dataclass
class Memory:
    """One storage that the simulated device knows."""

    ref: StorageWeakRef
    pinned: bool = False
    shared: bool = False
    """Streams use parts of it that are none of each other's: pages."""
    written: tuple[str, int] | None = None
    """By which stream, and when by its clock."""
    read: Clock = field(default_factory=dict)


@dataclass
class SimulatedEvent:
    """Reached after some looks."""

    clock: Clock
    streams: "SimulatedStreams"
    looks: int

    def query(self) -> bool:
        if self.looks > 0:
            self.looks -= 1
            return False
        self.streams.reached(self)
        return True

    def elapsed_time(self, end_event: "SimulatedEvent") -> float:
        assert self.streams.has_seen(self), "the time of an event is asked for before it is reached"
        assert self.streams.has_seen(end_event), "the time of an event is asked for before it is reached"
        return 1.0


class SimulatedStreams:
    """Implements `DeviceStreams`."""

    def __init__(self, *, looks: int = 2) -> None:
        """`looks`: how often an event says that it is not reached."""
        self.device = torch.device("cpu")
        self.looks = looks
        self.now: str | None = None
        """The stream that is on."""
        self.memories: dict[int, Memory] = {}
        self._clocks: dict[str, Clock] = {name.value: {} for name in StreamName} | {HOST: {}}
        self._late: list[tuple[str, int, Callable[[], None]]] = []

    @contextmanager
    def on(self, stream: StreamName) -> Iterator[None]:
        before, self.now = self.now, stream.value
        try:
            if before is None:
                with Functions(self), Operations(self):
                    yield
            else:
                yield
        finally:
            self.now = before

    def record(self, stream: StreamName, *, timed: bool = False) -> SimulatedEvent:
        clock = self._clocks[stream.value]
        clock[stream.value] = clock.get(stream.value, 0) + 1
        return SimulatedEvent({**clock}, self, self.looks)

    def wait(self, stream: StreamName, event: SimulatedEvent) -> None:
        self._learn(stream.value, event.clock)
        self._make_copies(event.clock)

    def host_memory(self, size: int) -> Tensor:
        memory = torch.full((size,), GARBAGE, dtype=torch.uint8)
        self.know(memory).pinned = True
        return memory

    def device_memory(self, size: int) -> Tensor:
        assert self.now is not None, "memory is some stream's"
        memory = torch.full((size,), GARBAGE, dtype=torch.uint8)
        self.know(memory)
        return memory

    def keep(self, tensor: Tensor, stream: StreamName) -> None:
        assert self.memory_of(tensor) is not None, f"{stream} keeps memory that is not the device's"

    def synchronize(self) -> None:
        for name in StreamName:
            self.reached(self.record(name))

    # What the modes ask.

    def adopt(self, *owners: object, shared: bool = False) -> None:
        """Every tensor in these objects is on the device from now on."""
        for owner in owners:
            for tensor in reachable(owner):
                if tensor.layout is torch.strided:
                    self.know(tensor).shared = shared

    def know(self, tensor: Tensor) -> Memory:
        """The storage of a device tensor."""
        ref = StorageWeakRef(tensor.untyped_storage())
        known = self.memories.get(ref.cdata)
        if known is None or known.ref.expired():
            known = self.memories[ref.cdata] = Memory(ref)
        return known

    def memory_of(self, tensor: Tensor) -> Memory | None:
        """None on the host, pinned memory apart."""
        if tensor.layout is not torch.strided:
            return Memory(StorageWeakRef(torch.empty(0).untyped_storage()))  # packed weights, which only layers have
        known = self.memories.get(tensor.untyped_storage()._cdata)
        return None if known is None or known.ref.expired() else known

    def on_device(self, tensor: Tensor) -> bool:
        known = self.memory_of(tensor)
        return known is not None and not known.pinned

    def reads(self, tensor: Tensor) -> None:
        known, stream = self.memory_of(tensor), self._stream
        if known is not None:
            self._require_order(known.written, stream, tensor, "reads what", known)
            known.read[stream] = self._clocks[stream].get(stream, 0)

    def writes(self, tensor: Tensor) -> None:
        known, stream = self.memory_of(tensor), self._stream
        if known is not None:
            self._require_order(known.written, stream, tensor, "overwrites what", known)
            for reader in known.read.items():
                self._require_order(reader, stream, tensor, "overwrites what is read by", known)
            known.written, known.read = (stream, self._clocks[stream].get(stream, 0)), {}

    def later(self, copy: Callable[[], None]) -> None:
        """Have `copy` made once the host has seen an event behind it."""
        self._late.append((self._stream, self._clocks[self._stream].get(self._stream, 0), copy))

    def reached(self, event: SimulatedEvent) -> None:
        self._learn(HOST, event.clock)
        self._make_copies(self._clocks[HOST])

    def reach_here(self) -> None:
        """What the stream that is on has queued so far is done before what comes."""
        if self._late:
            self._make_copies({self._stream: self._clocks[self._stream].get(self._stream, 0) + 1})

    def has_seen(self, event: SimulatedEvent) -> bool:
        """Whether the host knows that `event` is reached, from it or from one behind it."""
        return all(self._clocks[HOST].get(stream, 0) >= time for stream, time in event.clock.items())

    @property
    def _stream(self) -> str:
        assert self.now is not None, "the device is used on no stream"
        return self.now

    def _make_copies(self, before: Clock) -> None:
        late = self._late
        self._late = [each for each in late if each[1] >= before.get(each[0], 0)]
        # They may be made while a stream is on, and are none of its operations.
        with torch.inference_mode(), _disable_current_modes(), torch._C.DisableTorchFunction():
            for stream, time, copy in late:
                if time < before.get(stream, 0):
                    copy()

    def _learn(self, clock_of: str, clock: Clock) -> None:
        mine = self._clocks[clock_of]
        for stream, time in clock.items():
            mine[stream] = max(mine.get(stream, 0), time)

    def _require_order(self, at: tuple[str, int] | None, stream: str, tensor: Tensor, does: str, known: Memory) -> None:
        if at is None or at[0] == stream or known.shared:
            return
        # Launches come after whatever the host has seen.
        seen = max(self._clocks[stream].get(at[0], 0), self._clocks[HOST].get(at[0], 0))
        if seen <= at[1]:
            raise UnorderedError(
                f"stream {stream} {does} {at[0]} uses, {tuple(tensor.shape)} {tensor.dtype}, no event between"
            )


class Functions(TorchFunctionMode):
    """Sees what operations do not show: numpy, lists, and whether a device was named."""

    def __init__(self, streams: SimulatedStreams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in TO_HOST and self._streams.on_device(args[0]):
            raise HostWaitError(f"{func.__name__} of a tensor {tuple(args[0].shape)} on the device")
        if func in FROM_LISTS and "device" in kwargs and not isinstance(args[0], Tensor):
            raise HostWaitError(f"torch.{func.__name__} of a list on the device: its copy is waited for")
        result = func(*args, **kwargs)
        if func in FACTORIES and "device" in kwargs:
            self._streams.know(result)
        return result


class Operations(TorchDispatchMode):
    """Sees every operation on the stream that is on."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """To skip it, torch would import it: seconds."""
        return False

    def __init__(self, streams: SimulatedStreams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        streams = self._streams
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is ATEN.copy_.default:
            return self._copy(*args, **kwargs)
        on_device = [tensor for tensor in tensors if streams.on_device(tensor)]
        if not on_device:
            return func(*args, **kwargs)
        self._require_no_wait(func, args, kwargs)
        of_host = [tensor for tensor in tensors if tensor.dim() and tensor.numel() and not streams.on_device(tensor)]
        if of_host:
            raise MixedDevicesError(f"{func} mixes device tensors with {tuple(of_host[0].shape)} of the host")
        effect = _effect_of(func)
        written = [value for name, value in _arguments(func, args, kwargs) if name in effect.written]
        if not effect.is_view:
            for tensor in on_device:
                if not any(tensor is each for each in written):
                    streams.reads(tensor)
            for tensor in written:
                streams.writes(tensor)
        streams.reach_here()
        results = func(*args, **kwargs)
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and not streams.on_device(result):
                streams.know(result)
                streams.writes(result)
        return results

    def _require_no_wait(self, func: Any, args: Any, kwargs: Any) -> None:
        if func is ATEN.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
            return
        if func in SIZED_BY_VALUES:
            raise HostWaitError(f"{SIZED_BY_VALUES[func]} on the device")
        if func in INDEXED:
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            if masks:
                raise HostWaitError("an index by a boolean mask on the device: as many rows as it has ones")

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        streams = self._streams
        to, of = streams.memory_of(target), streams.memory_of(source)
        if to is None and of is None:
            return ATEN.copy_.default(target, source)
        if to is None or of is None:
            if source.dim() == 0 or not source.numel():
                return ATEN.copy_.default(target, source)
            raise HostWaitError(f"a copy {tuple(source.shape)} between the device and memory that is not pinned")
        if (to.pinned or of.pinned) and not non_blocking:
            raise HostWaitError(f"a copy {tuple(source.shape)} that the host waits for")
        streams.reads(source)
        streams.writes(target)
        if to.pinned:
            streams.later(lambda: ATEN.copy_.default(target, source))
            return target
        streams.reach_here()
        return ATEN.copy_.default(target, source)


def reachable(owner: object, *, but: type = NoneType) -> Iterator[Tensor]:
    """Every tensor that `owner` holds, however deep, but for what an object of the type `but` alone holds."""
    seen: set[int] = set()
    waiting = [owner]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, but | str | int | float | bytes | type | torch.dtype | torch.device):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
        elif is_dataclass(item):
            waiting += [getattr(item, each.name) for each in fields(item)]
        elif type(item).__module__.startswith(("tandem_engine", "tandem_testing")):
            waiting += vars(item).values() if hasattr(item, "__dict__") else ()


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        yield argument.name, value
    yield from kwargs.items()


@dataclass(frozen=True)
class Effect:
    """What an operation does to its arguments."""

    written: frozenset[str]
    is_view: bool


@cache
def _effect_of(func: Any) -> Effect:
    schema = func._schema
    aliased = [each.alias_info for each in schema.returns]
    return Effect(
        written=frozenset(each.name for each in schema.arguments if each.alias_info and each.alias_info.is_write),
        is_view=all(alias is not None and not alias.is_write for alias in aliased),
    )
