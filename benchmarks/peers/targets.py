"""What the ratios should be. Every target that a run has figures for, and no other."""

from collections.abc import Iterator, Sequence
from statistics import fmean, median

import msgspec

from peers.interference import Interference
from peers.ratios import against_best, combinations, middle, speed
from peers.results import Results
from peers.shapes import SHAPES
from peers.workloads import Prefill, Single

LARGEST = "q500m"
AGAINST_TRANSFORMERS = {"offline": 3.0, "tpot_ms": 2.0}
AGAINST_BEST = {
    "float32": {"offline": 1.3, "shared": 1.3, "tpot_ms": 1.1, "prefill": 0.98},
    "bfloat16": {"offline": 1.3, "shared": 1.3, "tpot_ms": 1.1, "prefill": 1.3},
}
NAMES = {"offline": "offline", "tpot_ms": "single stream", "prefill": "prefill of 2,048", "shared": "shared prefix"}


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One ratio against its bound. Start-up is in seconds."""

    name: str
    ratio: float
    target: float
    at_most: bool = False
    """Whether the target is the most that the ratio may be; else it is the least."""

    @property
    def met(self) -> bool:
        return self.ratio <= self.target if self.at_most else self.ratio >= self.target


def targets(results: Results) -> list[Target]:
    """In the order of the issue that asks for them."""
    return [
        *_transformers(results),
        *_best(results),
        *_disaggregated_peer(results),
        *_bounds(results),
        *_interference(results.interference),
        *_memory(results),
        *_startup(results),
    ]


def _transformers(results: Results) -> Iterator[Target]:
    for model, dtype in combinations(results.samples):
        for peer, kind in (("transformers", "generate"), ("transformers CB", "continuous batching")):
            for figure, least in AGAINST_TRANSFORMERS.items():
                ratio = speed(results.samples, model, dtype, figure, peer)
                if ratio is not None:
                    name = f"{NAMES[figure]} over transformers {kind}, {model} {dtype}"
                    yield Target(name=name, ratio=ratio, target=least)


def _best(results: Results) -> Iterator[Target]:
    for model, dtype in combinations(results.samples):
        for figure, least in AGAINST_BEST[dtype].items():
            best = against_best(results.samples, model, dtype, figure)
            if best is not None:
                name = f"{NAMES[figure]} over the best engine ({best[1]}), {model} {dtype}"
                yield Target(name=name, ratio=best[0], target=least)


def _disaggregated_peer(results: Results) -> Iterator[Target]:
    for model, dtype in combinations(results.samples):
        both = (results.samples, model, dtype)
        throughput = speed(*both, "offline", "vllm 1P+1D", ours="tandem 1P+1D")
        if throughput is not None:
            name = f"1P+1D offline over vLLM's over NIXL, {model} {dtype}"
            yield Target(name=name, ratio=throughput, target=3.0)
        latency = speed(*both, "tpot_ms", "vllm 1P+1D", ours="tandem 1P+1D")
        if latency is not None:
            name = f"1P+1D time per token over vLLM's over NIXL, {model} {dtype}"
            yield Target(name=name, ratio=1 / latency, target=0.4, at_most=True)


def bandwidth_share(results: Results, model: str, dtype: str) -> float | None:
    """Of memory bandwidth that a single stream's decode uses; None without its figure."""
    tpot = middle(results.samples, "tandem", model, dtype, "tpot_ms")
    if tpot is None or results.limits is None:
        return None
    context = 128 + Single().output // 2
    return SHAPES[model].decode_bytes(context, dtype) / (tpot / 1e3) / (results.limits.memory_gb_s * 1e9)


def gemm_share(results: Results, model: str, dtype: str) -> float | None:
    """Of the rate of matrix products that a prefill of 2,048 tokens reaches; None without its figure."""
    rate = middle(results.samples, "tandem", model, dtype, "prefill")
    if rate is None or results.limits is None:
        return None
    seconds = Prefill().length / rate
    return SHAPES[model].operations(Prefill().jobs(0)) / seconds / (results.limits.gflops[dtype] * 1e9)


def _bounds(results: Results) -> Iterator[Target]:
    for model, dtype in combinations(results.samples):
        if model != LARGEST:
            continue
        for what, share in (("bandwidth in decode", bandwidth_share), ("GEMM rate in prefill", gemm_share)):
            ratio = share(results, model, dtype)
            if ratio is not None:
                yield Target(name=f"share of {what}, {model} {dtype}", ratio=ratio, target=0.8)


def _interference(rounds: Sequence[Interference]) -> Iterator[Target]:
    for model, dtype in dict.fromkeys((each.model, each.dtype) for each in rounds):
        mine = {each.round: each for each in _of(rounds, "tandem 1P+1D", model, dtype)}
        mixed = {each.round: each for each in _of(rounds, "tandem mixed", model, dtype)}
        both = [(mine[number], mixed[number]) for number in mine if number in mixed]
        if both:
            where = f"1P+1D over one mixed worker under arriving prompts, {model} {dtype}"
            latency = median(ours.itl_ms["p99"] / theirs.itl_ms["p99"] for ours, theirs in both)
            yield Target(name=f"ITL p99, {where}", ratio=latency, target=0.5, at_most=True)
            throughput = median(ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in both)
            yield Target(name=f"throughput, {where}", ratio=throughput, target=0.9)


def _of(rounds: Sequence[Interference], engine: str, model: str, dtype: str) -> list[Interference]:
    return [each for each in rounds if (each.engine, each.model, each.dtype) == (engine, model, dtype)]


def _memory(results: Results) -> Iterator[Target]:
    for each in results.memory:
        name = f"memory over weights and KV pool, {each.model} {each.dtype}"
        yield Target(name=name, ratio=each.ratio, target=1.15, at_most=True)


def _startup(results: Results) -> Iterator[Target]:
    if results.startup is not None:
        yield Target(name="tandem up ready, s", ratio=results.startup.ready_s, target=8.0, at_most=True)
        yield Target(name="tandem --help, s", ratio=results.startup.help_s, target=0.3, at_most=True)


def others_share(results: Results) -> float:
    """Mean share of the machine that others used during the figures: how far to trust them."""
    shares = [sample.others for sample in results.samples] + [each.others for each in results.interference]
    return fmean(shares) if shares else 0.0
