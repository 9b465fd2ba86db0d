"""What the ratios should be: every target, with the reason where a run has no figures for it."""

from collections.abc import Iterator, Sequence
from statistics import fmean, median

import msgspec

from peers.interference import Interference
from peers.ratios import ENGINES, OURS, against_best, combinations, middle, speed
from peers.results import BESIDE_CONTINUOUS, DECODES_UNDER_PROMPTS, DISAGGREGATED, STARTUP, Results
from peers.shapes import BYTES, SHAPES
from peers.workloads import Prefill, Single

PLAYED = (("q25m", "float32"), ("q25m", "bfloat16"))
"""What every run that is to judge all targets plays; disaggregation and continuous batching are of the first."""
LARGEST = "q500m"
REMEMBERED = (*PLAYED, (LARGEST, "float32"), (LARGEST, "bfloat16"))
AGAINST_TRANSFORMERS = {"offline": 3.0, "tpot_ms": 2.0}
AGAINST_BEST = {
    "float32": {"offline": 1.3, "shared": 1.3, "tpot_ms": 1.1, "prefill": 0.98},
    "bfloat16": {"offline": 1.3, "shared": 1.3, "tpot_ms": 1.1, "prefill": 1.3},
}
NAMES = {"offline": "offline", "tpot_ms": "single stream", "prefill": "prefill of 2,048", "shared": "shared prefix"}


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One ratio against its bound. Start-up is in seconds."""

    name: str
    ratio: float | None
    """None where it was not measured."""
    target: float
    at_most: bool = False
    """Whether the target is the most that the ratio may be; else it is the least."""
    reason: str | None = None
    """Why there is no ratio."""

    @property
    def met(self) -> bool:
        if self.ratio is None:
            return False
        return self.ratio <= self.target if self.at_most else self.ratio >= self.target


def targets(results: Results) -> list[Target]:
    """In the order of the issue that asks for them."""
    return [
        *_transformers(results),
        *_best(results),
        *_disaggregated_peer(results),
        *_bounds(results),
        *_interference(results),
        *_memory(results),
        *_startup(results),
    ]


def _with(known: Sequence[tuple[str, str]], results: Results) -> list[tuple[str, str]]:
    """These models and dtypes and all others that there are samples of."""
    return list(dict.fromkeys([*known, *combinations(results.samples)]))


def why_not(results: Results, stage: str, *engines: str) -> str:
    """Why a stage has no figure of these engines, or of one of them."""
    for engine in engines:
        if engine in results.missing:
            return f"{engine} is not there: {results.missing[engine]}"
    return "; ".join(results.notes(stage, *engines)) or "this run was not asked for it"


def _transformers(results: Results) -> Iterator[Target]:
    played = [(sample.model, sample.dtype, sample.engine) for sample in results.samples]
    for model, dtype in _with(PLAYED, results):
        for peer, kind, behind in (
            ("transformers", "generate", ""),
            ("transformers CB", "continuous batching", BESIDE_CONTINUOUS),
        ):
            expected = (model, dtype) in (PLAYED[:1] if behind else PLAYED)
            if not expected and (model, dtype, peer) not in played:
                continue
            reason = why_not(results, f"{model} {dtype}{behind}", peer, OURS)
            for figure, least in AGAINST_TRANSFORMERS.items():
                name = f"{NAMES[figure]} over transformers {kind}, {model} {dtype}"
                yield _judged(name, speed(results.samples, model, dtype, figure, peer), least, reason)


def _best(results: Results) -> Iterator[Target]:
    for model, dtype in _with(PLAYED, results):
        reason = why_not(results, f"{model} {dtype}", *ENGINES, OURS)
        for figure, least in AGAINST_BEST[dtype].items():
            best = against_best(results.samples, model, dtype, figure)
            if best is not None or (model, dtype) in PLAYED:
                ratio, peer = (None, "") if best is None else (best[0], f" ({best[1]})")
                yield _judged(f"{NAMES[figure]} over the best engine{peer}, {model} {dtype}", ratio, least, reason)


def _disaggregated_peer(results: Results) -> Iterator[Target]:
    sides = ("vllm 1P+1D", "tandem 1P+1D")
    served = [(each.model, each.dtype) for each in results.samples if each.engine in sides]
    for model, dtype in dict.fromkeys([*PLAYED[:1], *served]):
        both = (results.samples, model, dtype)
        where = f"over vLLM's over NIXL, {model} {dtype}"
        throughput = speed(*both, "offline", sides[0], ours=sides[1])
        latency = speed(*both, "tpot_ms", sides[0], ours=sides[1])
        reason = why_not(results, f"{model} {dtype}{DISAGGREGATED}", "vllm", *sides)
        yield _judged(f"1P+1D offline {where}", throughput, 3.0, reason)
        inverse = None if latency is None else 1 / latency
        yield _judged(f"1P+1D time per token {where}", inverse, 0.4, reason, at_most=True)


def _judged(name: str, ratio: float | None, target: float, reason: str, *, at_most: bool = False) -> Target:
    return Target(name=name, ratio=ratio, target=target, at_most=at_most, reason=reason if ratio is None else None)


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
    for dtype in BYTES:
        for what, share in (("bandwidth in decode", bandwidth_share), ("GEMM rate in prefill", gemm_share)):
            reason = "the limits of the machine were not measured"
            if results.limits is not None:
                reason = why_not(results, f"{LARGEST} {dtype}", OURS)
            yield _judged(f"share of {what}, {LARGEST} {dtype}", share(results, LARGEST, dtype), 0.8, reason)


def _interference(results: Results) -> Iterator[Target]:
    rounds = results.interference
    for model, dtype in dict.fromkeys([*PLAYED[:1], *((each.model, each.dtype) for each in rounds)]):
        mine = {each.round: each for each in _of(rounds, "tandem 1P+1D", model, dtype)}
        mixed = {each.round: each for each in _of(rounds, "tandem mixed", model, dtype)}
        both = [(mine[number], mixed[number]) for number in mine if number in mixed]
        where = f"1P+1D over one mixed worker under arriving prompts, {model} {dtype}"
        reason = why_not(results, f"{model} {dtype}{DECODES_UNDER_PROMPTS}", "tandem 1P+1D", "tandem mixed")
        latency = median(ours.itl_ms["p99"] / theirs.itl_ms["p99"] for ours, theirs in both) if both else None
        throughput = median(ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in both) if both else None
        yield _judged(f"ITL p99, {where}", latency, 0.5, reason, at_most=True)
        yield _judged(f"throughput, {where}", throughput, 0.9, reason)


def _of(rounds: Sequence[Interference], engine: str, model: str, dtype: str) -> list[Interference]:
    return [each for each in rounds if (each.engine, each.model, each.dtype) == (engine, model, dtype)]


def _memory(results: Results) -> Iterator[Target]:
    measured = {(each.model, each.dtype): each.ratio for each in results.memory}
    for model, dtype in dict.fromkeys([*REMEMBERED, *measured]):
        name = f"memory over weights and KV pool, {model} {dtype}"
        yield _judged(
            name, measured.get((model, dtype)), 1.15, why_not(results, f"memory {model} {dtype}"), at_most=True
        )


def _startup(results: Results) -> Iterator[Target]:
    times, reason = results.startup, why_not(results, STARTUP)
    ready_s, help_s = (None, None) if times is None else (times.ready_s, times.help_s)
    yield _judged("tandem up ready, s", ready_s, 8.0, reason, at_most=True)
    yield _judged("tandem --help, s", help_s, 0.3, reason, at_most=True)


def others_share(results: Results) -> float:
    """Mean share of the machine that others used during the figures: how far to trust them."""
    shares = [sample.others for sample in results.samples] + [each.others for each in results.interference]
    return fmean(shares) if shares else 0.0
