"""How fast a worker is and how much KV it holds: measured on a running one, or estimated from model and device.

A step of b sequences with c tokens each takes

    measured   what `tandem ctl HOST:PORT rates` found, linear between the measured batches and contexts
    estimated  max(bytes read / bandwidth, FLOPs of b tokens / peak FLOPs) + what a step takes whatever it computes

The simulator's steps depend on the number of sequences alone, so c is that of the trace: the mean length of a sequence
while it decodes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from tandem_engine.base.errors import ConfigError
from tandem_lab.simulate.prefix_fetch import ServiceTimes
from tandem_lab.sizing.model_figures import ModelFigures

BATCHES = (1, 4, 16, 64, 256, 1024)
"""Sequences of a step whose times are given to the simulator."""

MAX_RATES_FILE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One GPU. Dense FLOPs per second at 16 bits, bytes per second and bytes of its memory."""

    flops: float
    bandwidth: float
    memory: float


GIB = float(1 << 30)
DEVICES = {
    # nvidia.com/en-us/data-center/h100: SXM, 989 TFLOPS bfloat16 without sparsity, 3.35 TB/s, 80 GB.
    "H100": Device(flops=989e12, bandwidth=3.35e12, memory=80e9),
    # nvidia.com/en-us/data-center/h200: the same compute, 4.8 TB/s, 141 GB.
    "H200": Device(flops=989e12, bandwidth=4.8e12, memory=141e9),
    # nvidia.com/en-us/data-center/a100: SXM, 312 TFLOPS bfloat16, 2.039 TB/s, 80 GB.
    "A100": Device(flops=312e12, bandwidth=2.039e12, memory=80e9),
    # nvidia.com/en-us/data-center/l40s: 362 TFLOPS bfloat16 without sparsity, 864 GB/s, 48 GB.
    "L40S": Device(flops=362e12, bandwidth=0.864e12, memory=48e9),
}

MFU = 0.5
"""Share of the peak FLOPs that prompts reach. 0.4 to 0.6 is what well-tuned engines report."""

BANDWIDTH_SHARE = 0.8
"""Of the memory bandwidth that decode steps reach."""

MEMORY_SHARE = 0.88
"""Of the memory for weights and KV."""

STEP_BASE_S = 0.002
"""Scheduling, launches and sampling of a step."""

ALL_REDUCE_S = 15e-6
"""Latency of one reduction among the GPUs of a worker; two for each layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRates:
    """One worker of `gpus` GPUs."""

    gpus: int
    prefill_rate: float
    """Prompt tokens per second."""
    steps: tuple[tuple[int, float], ...]
    """(Sequences, seconds) of a decode step, ascending."""
    token_bytes: float
    transfer_rate: float
    """Bytes per second of a link."""
    pool_tokens: int
    """Of KV that it holds."""
    measured: bool

    def times(self, chunk_tokens: int) -> ServiceTimes:
        return ServiceTimes(
            prefill_rate=self.prefill_rate,
            chunk_tokens=chunk_tokens,
            decode_steps=self.steps,
            token_bytes=self.token_bytes,
            transfer_rate=self.transfer_rate,
        )

    def step_s(self, sequences: int) -> float:
        return ServiceTimes(decode_steps=self.steps).decode_step_s(sequences)


def estimated(
    model: ModelFigures, device: Device, *, gpus: int, context: float, mfu: float, transfer_rate: float
) -> WorkerRates | None:
    """By the roofline of `gpus` devices; None where the weights leave no memory for a sequence of `context` tokens."""
    weights = model.parameters * model.weight_bits / 8
    active = model.active_parameters * model.weight_bits / 8
    pool_tokens = int((gpus * device.memory * MEMORY_SHARE - weights) / model.kv_bytes)
    if pool_tokens < context:
        return None
    base = STEP_BASE_S + (2 * model.layers * ALL_REDUCE_S if gpus > 1 else 0.0)

    def step(sequences: int) -> float:
        # With experts a large batch reads all of them: each sequence adds those that it chooses.
        read = min(weights, active * sequences) + sequences * context * model.kv_bytes
        memory_s = read / (gpus * device.bandwidth * BANDWIDTH_SHARE)
        compute_s = 2 * model.active_parameters * sequences / (gpus * device.flops * mfu)
        return max(memory_s, compute_s) + base

    return WorkerRates(
        gpus=gpus,
        prefill_rate=gpus * device.flops * mfu / (2 * model.active_parameters),
        steps=tuple((batch, step(batch)) for batch in BATCHES),
        token_bytes=model.kv_bytes,
        transfer_rate=transfer_rate,
        pool_tokens=pool_tokens,
        measured=False,
    )


_Seconds = Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]


class PrefillRate(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt of `tokens` alone in the worker."""

    tokens: _Tokens
    seconds: _Seconds


class DecodeRate(msgspec.Struct, frozen=True, kw_only=True):
    """A step of `batch` sequences with `context` tokens each."""

    batch: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    context: _Tokens
    seconds: _Seconds


class RatesFile(msgspec.Struct, frozen=True, kw_only=True):
    """What `tandem ctl HOST:PORT rates --out` writes."""

    version: Annotated[int, msgspec.Meta(ge=1, le=1)]
    tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    pool_tokens: _Tokens
    token_bytes: Annotated[float, msgspec.Meta(gt=0.0, le=1e9)]
    transfer_bytes_per_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e15)] = 0.0
    """0: the worker has measured no link."""
    prefill: Annotated[tuple[PrefillRate, ...], msgspec.Meta(min_length=2, max_length=64)]
    decode: Annotated[tuple[DecodeRate, ...], msgspec.Meta(min_length=1, max_length=1024)]


def read_rates(path: Path) -> RatesFile:
    """Raises `ConfigError` that names the file and the field."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--rates {path}: {error.strerror or error}") from error
    if len(data) > MAX_RATES_FILE:
        raise ConfigError(f"--rates {path}: larger than {MAX_RATES_FILE} bytes; it is not a file of measured rates")
    try:
        return msgspec.json.decode(data, type=RatesFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--rates {path}: {error}; write it with tandem ctl HOST:PORT rates --out {path}") from error


def measured(rates: RatesFile, *, context: float, transfer_rate: float) -> WorkerRates:
    """Decode steps at sequences of `context` tokens. `transfer_rate`: where the worker has measured no link."""
    batches = sorted({each.batch for each in rates.decode})
    return WorkerRates(
        gpus=rates.tensor_parallel_size,
        prefill_rate=_slope_rate(rates.prefill),
        steps=tuple((batch, _at_context(rates.decode, batch, context)) for batch in batches),
        token_bytes=rates.token_bytes,
        transfer_rate=rates.transfer_bytes_per_s or transfer_rate,
        pool_tokens=rates.pool_tokens,
        measured=True,
    )


def _slope_rate(prefill: Sequence[PrefillRate]) -> float:
    """Tokens per second of a further token, by least squares: what any step takes is in the decode steps."""
    mean_tokens = sum(each.tokens for each in prefill) / len(prefill)
    mean_seconds = sum(each.seconds for each in prefill) / len(prefill)
    above = sum((each.tokens - mean_tokens) * (each.seconds - mean_seconds) for each in prefill)
    below = sum((each.tokens - mean_tokens) ** 2 for each in prefill)
    slope = above / below if below else 0.0
    longest = max(prefill, key=lambda each: each.tokens)
    return 1.0 / slope if slope > 0.0 else longest.tokens / longest.seconds


def _at_context(decode: Sequence[DecodeRate], batch: int, context: float) -> float:
    """Linear between the nearest measured contexts, and beyond them."""
    found = sorted((each.context, each.seconds) for each in decode if each.batch == batch)
    if len(found) == 1:
        return found[0][1]
    place = next((n for n, (tokens, _) in enumerate(found) if tokens >= context), len(found) - 1)
    (low, low_s), (high, high_s) = found[max(0, place - 1)], found[max(1, place)]
    if low == high:
        return low_s
    return max(min(low_s, high_s) / 2, low_s + (high_s - low_s) * (context - low) / (high - low))


def slower(rates: WorkerRates, factor: float) -> WorkerRates:
    """With all times longer by `factor`, a number of at least 1: a margin for what a model leaves out."""
    if not math.isfinite(factor) or factor < 1.0:
        raise ConfigError(f"--margin must be at least 1, got {factor:g}")
    steps = tuple((batch, seconds * factor) for batch, seconds in rates.steps)
    return replace(rates, prefill_rate=rates.prefill_rate / factor, steps=steps)
