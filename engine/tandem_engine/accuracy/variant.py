"""One way to hold a model, and the logits that it gives: through the engine's own steps, kernels and KV pages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from tandem_engine.config import CacheConfig, DisaggConfig, EngineConfig, GraphConfig, KvCacheDtype, Quantization
from tandem_engine.engine import Engine
from tandem_engine.loaded_model import LoadedModel, load

CHUNK = 256
"""Tokens of a step: their logits are in memory together."""
PAGE_SIZE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """A checkpoint and how it is loaded."""

    path: str
    dtype: str
    quantization: Quantization = Quantization.AUTO
    device: str = "cpu"
    threads: int = 0

    def load(self, *, window: int, progress: bool) -> LoadedModel:
        """For windows of so many tokens. Raises `CheckpointError` and `ConfigError`."""
        config = EngineConfig(
            model_path=self.path,
            dtype=self.dtype,
            quantization=self.quantization,
            device=self.device,
            threads=self.threads,
            context_length=window,
            cache=CacheConfig(page_size=PAGE_SIZE, num_pages=-(-window // PAGE_SIZE) + 2),
            disagg=DisaggConfig(transport="none"),
            graphs=GraphConfig(enabled=False),
        )
        return load(config, progress=progress)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Weights with KV pages of a dtype."""

    weights: Weights
    kv_dtype: KvCacheDtype

    def engine(self, loaded: LoadedModel) -> Engine:
        """Around `weights` that are loaded. Raises `ConfigError`."""
        config = loaded.config
        return Engine.build(loaded, replace(config, cache=replace(config.cache, dtype=self.kv_dtype)))

    @property
    def name(self) -> str:
        """Of its row."""
        return f"{Path(self.weights.path).name}, {self.weights.dtype}, {self.weights.quantization}, KV {self.kv_dtype}"


def predictions(engine: Engine, window: Sequence[int]) -> Iterator[tuple[range, Tensor]]:
    """Which places of `window` come next, and the logits [n, vocab] float32 before each of them."""
    begin = 1
    for logits in engine.forced_logits(window[:-1], chunk=CHUNK):
        yield range(begin, begin + len(logits)), logits
        begin += len(logits)
