"""Graphs for the simulated device: the operations of one run, which can be run again on the same memory.

As a CUDA graph does, a tape keeps addresses and numbers: what Python decided when it was recorded stays decided, each
result is written where the first one was, and inputs are what lies at their places at the time of the replay.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem_engine.executor.cuda.streams import StreamName
from tandem_testing.simulated_device import SimulatedStreams

T = TypeVar("T")


@dataclass
class Tape:
    """Implements `Captured`."""

    streams: SimulatedStreams
    operations: list[tuple[Any, Any, Any, list[Tensor]]] = field(default_factory=list)
    """Function, arguments, and those results that have memory of their own."""
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, results in self.operations:
            again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for result, new in zip(results, again, strict=False):
                self.streams.know(new)  # of an operation without inputs nothing else would
                result.copy_(new)

    def inputs(self) -> set[int]:
        """Storages that it reads and has not made."""
        made: set[int] = set()
        read: set[int] = set()
        for _, args, kwargs, results in self.operations:
            read |= {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)} - made
            made |= {_storage(result) for result in results}
        return read


@dataclass
class TapeCapturer:
    """Implements `GraphCapturer`."""

    streams: SimulatedStreams
    tapes: list[Tape] = field(default_factory=list)

    def new_pool(self) -> None:
        """Each tape has memory of its own."""

    def capture(self, run: Callable[[], T]) -> tuple[Tape, T]:
        tape = Tape(self.streams)
        with self.streams.on(StreamName.FORWARD):
            run()
            with Recorder(tape):
                outputs = run()
        self.tapes.append(tape)
        return tape, outputs


class Recorder(TorchDispatchMode):
    """Writes operations down as they are run."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """To skip it, torch would import it: seconds."""
        return False

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        own = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor) and _storage(leaf) not in given]
        if own or func._schema.is_mutable:
            self._tape.operations.append((func, args, kwargs, own))
        return results


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
