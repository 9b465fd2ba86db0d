"""The load that is sized for: one half of a trace, the other half for the proof, and what its objectives need at least.

Bounds here hold for any number of workers, so they are checked before anything is simulated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, mean, stdev

from tandem_engine.base.errors import ConfigError
from tandem_lab.simulate.requests import SimulatedRequest, simulated_requests
from tandem_lab.sizing.rates import WorkerRates
from tandem_lab.traces import TRACE_BLOCK, TraceRow

WINDOWS = 8
"""Of a half, for the variation of its rate: long enough to be independent of each other, and enough for a variance."""

MAX_RATE = 2.0
"""Of a load whose variation is greater, a half says little: the proof shows it."""

MIN_REQUESTS = 20
"""In each half; fewer say nothing about a percentile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Objectives:
    """Latencies that `percentile` of the requests are to meet, both of them."""

    ttft_s: float
    itl_s: float
    percentile: float


@dataclass(frozen=True, slots=True)
class Halves:
    """By time of arrival."""

    sized: list[SimulatedRequest]
    proof: list[SimulatedRequest]


def halves(rows: Sequence[TraceRow], *, speed: float = 1.0) -> Halves:
    """Raises `ConfigError` that says what a trace lacks. Each half begins at 0 with its first request."""
    if len(rows) < 2 * MIN_REQUESTS:
        raise ConfigError(
            f"--trace: {len(rows)} requests; at least {2 * MIN_REQUESTS} are needed, half of them for the proof"
        )
    ordered = sorted(rows, key=lambda row: row.at)
    span = (ordered[-1].at - ordered[0].at) / speed
    if not span > 0.0:
        raise ConfigError(
            "--trace: all requests arrive at one time, so there is no rate to size for; their timestamps must differ"
        )
    middle = len(ordered) // 2
    first, second = ordered[:middle], ordered[middle:]
    for half, name in ((first, "first"), (second, "second")):
        if half[-1].at == half[0].at:
            raise ConfigError(f"--trace: all requests of the {name} half arrive at one time; give a longer trace")
    return Halves(*(simulated_requests(half, limit=None, speed=speed) for half in (first, second)))


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadFigures:
    """Of one half."""

    seconds: float
    """From the first arrival to the last."""
    uncached: tuple[int, ...]
    """Prompt tokens of each request that a cache without bounds would have to compute."""
    outputs: int
    """Output tokens of all requests and choices."""
    longest: int
    """Tokens of the longest sequence."""
    context: float
    """Mean length of a sequence over its decode steps."""


def load_figures(requests: Sequence[SimulatedRequest]) -> LoadFigures:
    seen: set[bytes] = set()
    uncached, weighted, outputs = [], 0.0, 0
    for request in requests:
        known = 0
        while known < len(request.chain) and request.chain[known] in seen:
            known += 1
        seen.update(request.chain)
        uncached.append(max(1, request.prompt_tokens - known * TRACE_BLOCK))
        tokens = request.total_output_tokens
        weighted += tokens * (request.prompt_tokens + request.output_tokens / 2)
        outputs += tokens
    return LoadFigures(
        seconds=requests[-1].at - requests[0].at,
        uncached=tuple(uncached),
        outputs=outputs,
        longest=max(request.prompt_tokens + request.output_tokens for request in requests),
        context=weighted / outputs,
    )


def upper_rate(requests: Sequence[SimulatedRequest], load: LoadFigures, confidence: float) -> float:
    """The rate of the load, over that of this half, which it exceeds only with a probability of 1 - `confidence`.

    A half is one sample of the load: another one of the same load has more tokens, or fewer. The standard error of its
    rate follows from the variation between `WINDOWS` parts of it, which also contains bursts and trends.
    """
    begin, window_s = requests[0].at, load.seconds / WINDOWS
    prompts, outputs = [0.0] * WINDOWS, [0.0] * WINDOWS
    for request, uncached in zip(requests, load.uncached, strict=True):
        place = min(WINDOWS - 1, int((request.at - begin) / window_s))
        prompts[place] += uncached
        outputs[place] += request.total_output_tokens
    error = max(stdev(each) / mean(each) for each in (prompts, outputs) if any(each)) / math.sqrt(WINDOWS)
    return min(MAX_RATE, 1.0 + max(0.0, _student_quantile(confidence, WINDOWS - 1)) * error)


def _student_quantile(share: float, freedom: float) -> float:
    """Of Student's t, since the variance is estimated as well: an expansion around the normal quantile, within
    1 % for 7 degrees of freedom and shares up to 0.999.
    """
    z = NormalDist().inv_cdf(share)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def faster(requests: Sequence[SimulatedRequest], rate: float) -> list[SimulatedRequest]:
    """The same requests at `rate` times their rate."""
    return [replace(request, at=request.at / rate) for request in requests]


def infeasible(load: LoadFigures, rates: WorkerRates, wanted: Objectives) -> str | None:
    """Why no number of these workers can meet the objectives, and what would; None if nothing is known against it."""
    if load.longest > rates.pool_tokens:
        return f"the longest sequence has {load.longest} tokens, and a worker holds KV of {rates.pool_tokens}"
    allowed = math.floor((1 - wanted.percentile) * len(load.uncached) + 1e-9)
    hardest = sorted(load.uncached, reverse=True)[min(allowed, len(load.uncached) - 1)]
    alone_s = hardest / rates.prefill_rate
    if alone_s > wanted.ttft_s:
        return (
            f"a prompt of {hardest} uncached tokens takes {alone_s:.3g} s on an idle worker, and --ttft is "
            f"{wanted.ttft_s:g} s: at most {int(wanted.ttft_s * rates.prefill_rate)} tokens fit; more workers do not "
            f"help, but --ttft {_rounded_up(alone_s)}, or faster workers would"
        )
    if rates.step_s(1) > wanted.itl_s:
        return (
            f"a step of one sequence takes {rates.step_s(1) * 1e3:.3g} ms, and --itl is {wanted.itl_s * 1e3:g} ms: "
            f"more workers do not help, but --itl {_rounded_up(rates.step_s(1))}, or faster workers would"
        )
    return None


def _rounded_up(seconds: float) -> str:
    digits = 1 - math.floor(math.log10(seconds))
    return f"{math.ceil(seconds * 10**digits) / 10**digits:g}"


def most_running(rates: WorkerRates, wanted: Objectives) -> int:
    """Sequences whose steps still meet --itl; at least 1, where `infeasible` found nothing."""
    low, high = 1, rates.steps[-1][0]
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if rates.step_s(middle) <= wanted.itl_s else (low, middle - 1)
    return low


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Work over what one worker does in the same time, of a fluid: without queues, cache misses or imbalance."""

    prefill: float
    decode: float

    @property
    def least_decode(self) -> int:
        return max(1, math.ceil(self.decode))

    @property
    def least_total(self) -> int:
        """Of both roles: a decode worker may compute short prompts itself."""
        return max(2, math.ceil(self.prefill + self.decode))


def worker_load(load: LoadFigures, rates: WorkerRates, running: int) -> WorkerLoad:
    """Fewer workers than it says let work pile up. `running`: sequences of a decode step, at most."""
    fitting = max(1, min(running, int(rates.pool_tokens // max(1.0, load.context))))
    batches = {1, fitting, *(batch for batch, _ in rates.steps if batch <= fitting)}
    token_s = min(rates.step_s(batch) / batch for batch in batches)
    return WorkerLoad(
        prefill=sum(load.uncached) / (load.seconds * rates.prefill_rate),
        decode=load.outputs * token_s / load.seconds,
    )
