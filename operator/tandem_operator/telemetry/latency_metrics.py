"""What gateways and workers publish about latencies: hints, which may be absent.

    LatencyTotals    of a gateway: lengths of prompts, times to the first token and between tokens, objectives met
    LatencyFactors   of a gateway: measured over predicted latencies
    StepFit          of a worker: duration of its decode steps

Pods may be of a release without these metrics, so a missing one does not make the metrics of a pod incomplete. One that
is no number makes them unusable, as any other.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from tandem_operator.scaling.distribution import Distribution
from tandem_operator.telemetry.exposition import GATEWAY, WORKER, Exposition, Sample, UnusableFiguresError

MIN_FACTOR, MAX_FACTOR = 1.0 / 3.0, 3.0
"""Of calibrated predictions."""

MAX_STEP_S = 3_600.0


class StepFit(NamedTuple):
    """Seconds of a decode step: the sum of these."""

    base_s: float
    sequence_s: float
    """For each sequence."""
    kv_token_s: float
    """For each token of context of the sequences."""

    @staticmethod
    def of(exposition: Exposition) -> "StepFit | None":
        """None where the worker has none, or none that can be."""
        parts = {sample.labels.get("part"): sample.value for sample in exposition.of(WORKER + "step_fit_seconds")}
        values = [parts.get(name, math.nan) for name in ("base", "sequence", "kv_token")]
        is_usable = all(0.0 <= value <= MAX_STEP_S for value in values) and values[0] + values[1] > 0.0
        return StepFit(*values) if is_usable else None

    @staticmethod
    def mean(fits: "Iterable[StepFit]") -> "StepFit | None":
        """None of none."""
        taken = list(fits)
        if not taken:
            return None
        return StepFit(*(math.fsum(values) / len(taken) for values in zip(*taken, strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyTotals:
    """Of a gateway since its start, or the increase between two looks."""

    gap_square_s: float = 0.0
    """Squares of the times between arrivals."""
    output_tokens: float = 0.0
    good: float = 0.0
    """Requests that met all of their objectives."""
    judged: float = 0.0
    """Requests that had any."""
    uncached: Distribution | None = None
    """Tokens of prompts, without cached prefixes."""
    ttft_s: Distribution | None = None
    itl_s: Distribution | None = None

    @staticmethod
    def of(exposition: Exposition) -> "LatencyTotals":
        """Raises `UnusableFiguresError` for what is no number."""
        return LatencyTotals(
            gap_square_s=exposition.sum_or_zero(GATEWAY + "arrival_gap_square_seconds_total"),
            output_tokens=exposition.sum_or_zero(GATEWAY + "generation_tokens_total"),
            good=exposition.sum_or_zero(GATEWAY + "goodput_requests_total"),
            judged=_judged(exposition.of(GATEWAY + "slo_requests_total")),
            uncached=_distribution(exposition, "uncached_prompt_tokens"),
            ttft_s=_distribution(exposition, "time_to_first_token_seconds"),
            itl_s=_distribution(exposition, "inter_token_latency_seconds"),
        )

    def since(self, before: "LatencyTotals") -> "LatencyTotals":
        """The increase; the whole value of what has become less: the pod has restarted in the meantime."""
        increase: dict[str, Any] = {}
        for item in fields(self):
            now, then = getattr(self, item.name), getattr(before, item.name)
            if isinstance(now, Distribution):
                increase[item.name] = now.since(then)
            elif now is not None:
                increase[item.name] = now - then if now >= then else now
        return LatencyTotals(**increase)

    def plus(self, other: "LatencyTotals") -> "LatencyTotals":
        """Both together."""
        total: dict[str, Any] = {}
        for item in fields(self):
            mine, its = getattr(self, item.name), getattr(other, item.name)
            if mine is None or its is None:
                total[item.name] = its if mine is None else mine
            else:
                total[item.name] = mine.plus(its) if isinstance(mine, Distribution) else mine + its
        return LatencyTotals(**total)

    def times(self, factor: float) -> "LatencyTotals":
        """Each value counts `factor` times as much."""
        scaled: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None:
                scaled[item.name] = value.times(factor) if isinstance(value, Distribution) else factor * value
        return LatencyTotals(**scaled)


def _judged(samples: Iterable[Sample]) -> float:
    """Each objective is counted apart; all requests have those of the service."""
    by_objective: dict[str, float] = {}
    for sample in samples:
        if not math.isfinite(sample.value) or sample.value < 0:
            raise UnusableFiguresError(f"its metric {GATEWAY}slo_requests_total is {sample.value}")
        objective = sample.labels.get("objective", "")
        by_objective[objective] = by_objective.get(objective, 0.0) + sample.value
    return max(by_objective.values(), default=0.0)


def _distribution(exposition: Exposition, name: str) -> Distribution | None:
    """None where there is no histogram of this name. Raises `UnusableFiguresError` for one that cannot be."""
    by_bound: dict[float, float] = {}
    try:
        for sample in exposition.of(f"{GATEWAY}{name}_bucket"):
            bound = float(sample.labels.get("le", "nan"))
            by_bound[bound] = by_bound.get(bound, 0.0) + sample.value
        if not by_bound:
            return None
        bounds = sorted(by_bound)
        totals = [0.0, *(by_bound[bound] for bound in bounds)]
        counts = [now - before for before, now in pairwise(totals)]
        return Distribution.of(bounds, counts, exposition.sum(f"{GATEWAY}{name}_sum"))
    except ValueError as error:
        raise UnusableFiguresError(f"its histogram {GATEWAY}{name} cannot be used: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyFactors:
    """Medians over kinds of workers, placements and gateways."""

    queue: float = 1.0
    compute: float = 1.0
    itl: float = 1.0
    ttft_margin: float = 1.0
    itl_margin: float = 1.0
    is_calibrated: bool = True
    """Of most kinds and placements no factor is beyond its bounds: one of a former revision decides nothing."""

    @property
    def worst(self) -> float:
        """The correction farthest from 1, without that of queues that were shorter than predicted: reports of workers
        are older than such queues."""
        return max((max(1.0, self.queue), self.compute, self.itl), key=lambda factor: abs(math.log(factor)))

    @staticmethod
    def of(exposition: Exposition) -> "LatencyFactors | None":
        """None where there are none. Values that no gateway exports are left out."""
        by_name: dict[str, list[float]] = {}
        for sample in exposition.of(GATEWAY + "latency_factor"):
            if MIN_FACTOR * 0.999 <= sample.value <= MAX_FACTOR * 1.001:
                by_name.setdefault(sample.labels.get("factor", ""), []).append(sample.value)
        calibrated = exposition.of(GATEWAY + "latency_calibrated")
        if not by_name:
            return None
        known = {name: median(values) for name, values in by_name.items() if name in _FACTORS}
        return LatencyFactors(**known, is_calibrated=_most(sample.value > 0 for sample in calibrated))

    @staticmethod
    def together(factors: "Iterable[LatencyFactors]") -> "LatencyFactors":
        """Of several gateways; all 1 of none."""
        taken = list(factors)
        if not taken:
            return LatencyFactors()
        return LatencyFactors(
            **{name: median(getattr(one, name) for one in taken) for name in _FACTORS},
            is_calibrated=_most(one.is_calibrated for one in taken),
        )


def _most(facts: Iterable[bool]) -> bool:
    """Half of them, or more. True for none."""
    return median([float(fact) for fact in facts] or [1.0]) >= 0.5


_FACTORS = frozenset({"queue", "compute", "itl", "ttft_margin", "itl_margin"})
