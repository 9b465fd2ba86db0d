"""`tandem accuracy`: what fewer bits cost, on a text.

    1. the baseline predicts every token of the text from those before it; its predictions are kept in a file
    2. every variant predicts the same and is compared, place by place: other dtypes of weights and KV, checkpoints
    3. a table, or one JSON object

The engine's own steps compute both, so this measures Tandem's kernels and rounding. It is a measurement, not a test
with a bound. The text is cut into windows, each of which a model sees from its beginning. The default text is the
beginning of Lewis Carroll's "Alice's Adventures in Wonderland" (1865), which is in the public domain.

    perplexity        e^(mean −log q(t))                          t the token that follows
    KL divergence     Σ_v p(v) · (log p(v) − log q(v))            p the baseline's distribution, q the other's; in nats
    top-1 agreement   share of places where both have the same likeliest token
"""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from pathlib import Path
from tempfile import TemporaryFile
from typing import Never

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import (
    CacheConfig,
    DisaggConfig,
    EngineConfig,
    GraphConfig,
    KvCacheDtype,
    ModelImpl,
    Quantization,
)
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer


@dataclass(kw_only=True, slots=True)
class Divergence:
    """Sums over the places that were added so far."""

    places: int = 0
    surprise: float = 0.0
    kl: float = 0.0
    largest_kl: float = 0.0
    agreed: int = 0

    def add(self, baseline: Tensor, logits: Tensor, targets: Tensor) -> None:
        """A few more places.

        Args:
            baseline: float32 [n, vocab], log p.
            logits: float32 [n, vocab], of q.
            targets: int64 [n].
        """
        logprobs = logits.log_softmax(dim=-1)
        # A token that p excludes adds nothing, however unlikely q thinks it.
        terms = (baseline.double().exp() * (baseline - logprobs).double()).masked_fill(baseline.isneginf(), 0.0)
        kl = terms.sum(dim=-1).clamp(min=0.0)
        self.places += len(targets)
        self.surprise -= float(logprobs.gather(1, targets[:, None]).double().sum())
        self.kl += float(kl.sum())
        self.largest_kl = max(self.largest_kl, float(kl.max()))
        self.agreed += int((logprobs.argmax(dim=-1) == baseline.argmax(dim=-1)).sum())

    @property
    def perplexity(self) -> float:
        return math.exp(self.surprise / self.places)

    @property
    def mean_kl(self) -> float:
        return self.kl / self.places

    @property
    def agreement(self) -> float:
        return self.agreed / self.places


def kept(logits: Tensor) -> Tensor:
    """What `Divergence.add` wants of a baseline's logits."""
    return torch.log_softmax(logits, dim=-1)


OURS = Path(__file__).with_suffix(".txt")

SHORTEST = 2
"""Tokens of a window: one that is seen and one that is predicted."""


def read_text(path: Path | None) -> str:
    """The file's text, or ours. Raises `ConfigError` when it cannot be read."""
    try:
        return (path or OURS).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path} cannot be read as UTF-8: {error}") from error


def cut(tokens: Sequence[int], window: int, *, at_most: int) -> list[tuple[int, ...]]:
    """The first `at_most` of `tokens` as windows of `window`, the last one shorter.

    Raises:
        ConfigError: there is nothing to predict.
    """
    used = tokens[:at_most]
    windows = [tuple(used[begin : begin + window]) for begin in range(0, len(used), window)]
    windows = [each for each in windows if len(each) >= SHORTEST]
    if not windows:
        raise ConfigError(f"the text has {len(used)} tokens, of which none follows another: --text takes a longer one")
    return windows


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


@dataclass(frozen=True, kw_only=True, slots=True)
class AccuracyOptions:
    model_path: str
    baseline_dtype: str
    """Of weights and KV of what the others are compared with."""
    dtypes: tuple[str, ...]
    kv_dtypes: tuple[KvCacheDtype, ...]
    quantizations: tuple[Quantization, ...] = (Quantization.AUTO,)
    compared: tuple[str, ...] = ()
    """Further checkpoints of the same vocabulary."""
    text: Path | None = None
    """None is ours."""
    tokens: int = 4096
    """Of the text, at most."""
    window: int = 512
    device: str = "cpu"
    threads: int = 0
    as_json: bool = False

    def baseline(self) -> Variant:
        weights = self._weights(self.model_path, self.baseline_dtype, Quantization.AUTO)
        return Variant(weights=weights, kv_dtype=KvCacheDtype.AUTO)

    def variants(self) -> list[Variant]:
        """All but the baseline; those of the same weights one after the other."""
        paths, dtypes = (self.model_path, *self.compared), dict.fromkeys(self.dtypes)
        quantizations, kv_dtypes = dict.fromkeys(self.quantizations), dict.fromkeys(self.kv_dtypes)
        variants = [
            Variant(weights=self._weights(path, dtype, quantization), kv_dtype=kv)
            for path, dtype, quantization, kv in product(paths, dtypes, quantizations, kv_dtypes)
        ]
        return [variant for variant in variants if variant != self.baseline()]

    def _weights(self, path: str, dtype: str, quantization: Quantization) -> Weights:
        return Weights(path=path, dtype=dtype, quantization=quantization, device=self.device, threads=self.threads)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One variant."""

    model: str
    dtype: str
    """Of activations, and of weights that are not quantized."""
    quantization: Quantization
    """How projections were to be held."""
    held: str
    """How the checkpoint stores its weights and how they are held; "" for as they are, in the dtype."""
    kv_dtype: str
    kv_bytes_per_token: int
    perplexity: float
    mean_kl: float
    """In nats."""
    max_kl: float
    top1_agreement: float
    seconds: float


class AccuracyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    torch: str
    device: str
    predicted_tokens: int
    window: int
    baseline: Row
    variants: tuple[Row, ...]


def run_accuracy(options: AccuracyOptions) -> int:
    """Entry point of the command; returns the exit status. Raises `EngineError`."""
    _require_one_vocabulary(options)
    windows = _windows(options)
    loaded = options.baseline().weights.load(window=options.window, progress=not options.as_json)
    variants = options.variants()
    table = Table(silent=options.as_json)
    with tqdm(
        total=(1 + len(variants)) * len(windows),
        unit="window",
        file=sys.stderr,
        disable=True if options.as_json else None,
    ) as bar:
        measurement = Measurement(windows=windows, vocab_size=loaded.model_config.vocab_size, bar=bar)
        baseline = table.add(measurement.keep(options.baseline(), loaded))
        del loaded
        rows = tuple(table.add(row) for row in _compared(measurement, variants, options))
    if options.as_json:
        report = AccuracyReport(
            torch=str(torch.__version__),
            device=options.device,
            predicted_tokens=measurement.places,
            window=options.window,
            baseline=baseline,
            variants=rows,
        )
        print(msgspec.json.encode(report).decode())
    return 0


def _require_one_vocabulary(options: AccuracyOptions) -> None:
    first, *rest = (options.model_path, *options.compared)
    size = read_model_config(first, impl=ModelImpl.AUTO).vocab_size
    for path in rest:
        theirs = read_model_config(path, impl=ModelImpl.AUTO).vocab_size
        if theirs != size:
            raise ConfigError(
                f"{path} has {theirs} token ids and {first} {size}: only models of one vocabulary can be compared"
            )


def _windows(options: AccuracyOptions) -> list[tuple[int, ...]]:
    """The text in tokens of the model. Reads no weights."""
    folder = Path(options.model_path)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{folder} has no tokenizer.json, without which a text has no tokens")
    return cut(TextTokenizer.load(folder).encode(read_text(options.text)), options.window, at_most=options.tokens)


def _compared(measurement: "Measurement", variants: Sequence[Variant], options: AccuracyOptions) -> Iterator[Row]:
    """Weights are loaded once for all that hold their KV in different ways."""
    for weights, group in groupby(variants, key=lambda variant: variant.weights):
        loaded = weights.load(window=options.window, progress=not options.as_json)
        for variant in group:
            yield measurement.compare(variant, loaded)


@dataclass(kw_only=True)
class Measurement:
    """The baseline's opinion of a text, and what others make of the same."""

    windows: Sequence[Sequence[int]]
    vocab_size: int
    bar: "tqdm[Never]"
    baseline: npt.NDArray[np.float32] = field(init=False)
    """[places, vocab], log p: in a private file, for it is larger than many a model."""

    @property
    def places(self) -> int:
        return sum(len(window) - 1 for window in self.windows)

    def keep(self, variant: Variant, loaded: LoadedModel) -> Row:
        """Measure the baseline."""
        with TemporaryFile() as file:
            self.baseline = np.memmap(file, np.float32, "w+", shape=(self.places, self.vocab_size))
        return self._measure(variant, loaded, first=True)

    def compare(self, variant: Variant, loaded: LoadedModel) -> Row:
        return self._measure(variant, loaded, first=False)

    def _measure(self, variant: Variant, loaded: LoadedModel, *, first: bool) -> Row:
        began, divergence = time.perf_counter(), Divergence()
        self.bar.set_description(variant.name)
        with variant.engine(loaded) as engine:
            for window in self.windows:
                for places, logits in predictions(engine, window):
                    part = self.baseline[divergence.places : divergence.places + len(places)]
                    if first:
                        part[:] = kept(logits).numpy()
                    divergence.add(torch.from_numpy(part), logits, torch.tensor(window)[places.start : places.stop])
                self.bar.update()
            return _row(variant, loaded, engine, divergence, time.perf_counter() - began)


def _row(variant: Variant, loaded: LoadedModel, engine: Engine, found: Divergence, seconds: float) -> Row:
    geometry = engine.geometry
    return Row(
        model=variant.weights.path,
        dtype=geometry.model_dtype or geometry.dtype,
        quantization=variant.weights.quantization,
        held=loaded.model_config.quantization,
        kv_dtype=geometry.dtype,
        kv_bytes_per_token=geometry.page_bytes // geometry.page_size,
        perplexity=found.perplexity,
        mean_kl=found.mean_kl,
        max_kl=found.largest_kl,
        top1_agreement=found.agreement,
        seconds=seconds,
    )


@dataclass(kw_only=True)
class Table:
    """Rows as they come."""

    silent: bool
    _begun: bool = False

    def add(self, row: Row) -> Row:
        if not self.silent:
            if not self._begun:
                tqdm.write(_line(HEADINGS))
                self._begun = True
            tqdm.write(_line(_cells(row)))
        return row


HEADINGS = ("model", "dtype", "held", "KV", "KV B/token", "perplexity", "mean KL", "max KL", "top-1")
WIDTHS = ("<24", "<9", "<10", "<14", ">10", ">10", ">9", ">9", ">7")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        Path(row.model).name[:24],
        row.dtype,
        row.quantization,
        row.kv_dtype,
        f"{row.kv_bytes_per_token}",
        f"{row.perplexity:.4f}",
        f"{row.mean_kl:.2e}",
        f"{row.max_kl:.2e}",
        f"{row.top1_agreement:.2%}",
    )


def _line(cells: Sequence[str]) -> str:
    return " ".join(f"{cell:{width}}" for cell, width in zip(cells, WIDTHS, strict=True))
