"""Engines on the simulated device: the streams, graphs and samplers of a GPU, checked on a CPU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from tandem_engine.config import EngineConfig
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.executor.cuda.graphs import Decoding
from tandem_engine.executor.cuda.runner import StreamRunner
from tandem_engine.executor.platform import OnStreams, RunnerParts
from tandem_engine.memory.host.pages import HostPool
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.attention.backend import AttentionSpec
from tandem_engine.model.cpu import step
from tandem_testing.graph_tape import TapeCapturer
from tandem_testing.simulated_device import SimulatedStreams
from tandem_testing.turning_reference import TurningReference


class SimulatedPlatform(OnStreams):
    """A `Platform` over `SimulatedStreams`."""

    MAX_TOKENS = 32
    """Of a graph of prompts."""

    streams: SimulatedStreams

    def __init__(self, *, looks: int = 2) -> None:
        streams = SimulatedStreams(looks=looks)
        self.capturer = TapeCapturer(streams)
        self.backends: list[TurningReference] = []
        super().__init__(
            streams=streams,
            capturer=self.capturer,
            attention=lambda pool, _heads, specs, _dtype: self._turning(pool, specs),
        )

    def _turning(self, pool: KvPool, specs: Sequence[AttentionSpec]) -> TurningReference:
        self.backends.append(TurningReference(pool, specs=specs))
        return self.backends[-1]

    def runner(self, parts: RunnerParts) -> StreamRunner:
        return super().runner(self._adopted(parts))

    def graph_bytes(self, make: Callable[[], RunnerParts]) -> int:
        return super().graph_bytes(lambda: self._adopted(make()))

    def host_pool(self, *, num_pages: int, page_bytes: int) -> HostPool:
        pool = super().host_pool(num_pages=num_pages, page_bytes=page_bytes)
        memory = self.streams.know(pool.data)
        memory.pinned = memory.shared = True
        return pool

    def decoding_of(self, runner: StreamRunner) -> Decoding:
        """What a step of `runner` decodes with."""
        return Decoding(
            model=runner.model,
            backend=runner.backend,
            future_map=runner.future_map,
            observer=None,
            device=self.streams.device,
            max_pages=4,
        )

    @property
    def turned(self) -> int:
        """Layers whose heads attention has turned itself."""
        return sum(backend.turned for backend in self.backends)

    @property
    def replays(self) -> int:
        """Of all graphs."""
        return sum(tape.replays for tape in self.capturer.tapes)

    def _adopted(self, parts: RunnerParts) -> RunnerParts:
        """`parts` on the device."""
        self.streams.adopt(parts.model, parts.observer)
        pools = [parts.pool] if parts.groups is None else parts.groups.pools
        self.streams.adopt(*(pool.data for pool in pools), shared=True)
        if parts.states is not None:
            self.streams.adopt(parts.states.bytes_view(), shared=True)
        prompts = tuple(tokens for tokens in parts.prompt_sizes if tokens <= self.MAX_TOKENS)
        return replace(parts, prompt_sizes=prompts)


def load_simulated(checkpoint: Path, **config: object) -> LoadedModel:
    """Load as for a device: without the CPU's fused step, which no stream could run."""
    with without_fused_steps():
        return load(EngineConfig(model_path=str(checkpoint), dtype="float32", **config), progress=False)


@contextmanager
def without_fused_steps() -> Iterator[None]:
    with patch.object(step, "fuse", lambda *_, **__: None):
        yield
