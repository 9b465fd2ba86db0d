"""A device that is a CPU and checks nothing: the engine of a GPU, for kernels that are interpreted.

The simulated device watches operations of torch, and interpreted kernels are none. So it checks rules of streams to
check, and numbers of kernels this one's.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from tandem_engine.executor.cuda.runner import StreamRunner, tensors_of
from tandem_engine.executor.cuda.streams import StreamName
from tandem_engine.executor.platform import OnStreams, RunnerParts, gpu_attention
from tandem_engine.forward.kv_progress import Event

T = TypeVar("T")


class Reached:
    """An event that is."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: "Reached") -> float:
        return 1.0


class PlainStreams:
    """Implements `DeviceStreams`: everything is done at once."""

    device = torch.device("cpu")

    def on(self, stream: StreamName) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self, stream: StreamName, *, timed: bool = False) -> Reached:
        return Reached()

    def wait(self, stream: StreamName, event: Event) -> None:
        pass

    def host_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def device_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def keep(self, tensor: Tensor, stream: StreamName) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Again:
    """A graph that runs what it was made of once more, and writes its results where the first ones are."""

    def __init__(self, run: Callable[[], object], outputs: object) -> None:
        self._run = run
        self._outputs = tensors_of(outputs)

    def replay(self) -> None:
        for place, result in zip(self._outputs, tensors_of(self._run()), strict=True):
            place.copy_(result)


class AgainCapturer:
    """Implements `GraphCapturer`."""

    def new_pool(self) -> None:
        pass

    def capture(self, run: Callable[[], T]) -> tuple[Again, T]:
        outputs = run()
        return Again(run, outputs), outputs


class PlainDevice(OnStreams):
    """A `Platform` with the attention of a GPU, and with no graph of more rows or tokens than these."""

    MAX_ROWS = 2
    MAX_TOKENS = 16

    def __init__(self) -> None:
        super().__init__(streams=PlainStreams(), capturer=AgainCapturer(), attention=gpu_attention)

    def runner(self, parts: RunnerParts) -> StreamRunner:
        decodes = tuple(rows for rows in parts.graph_sizes if rows <= self.MAX_ROWS)
        prompts = tuple(tokens for tokens in parts.prompt_sizes if tokens <= self.MAX_TOKENS)
        return super().runner(replace(parts, graph_sizes=decodes, prompt_sizes=prompts))
