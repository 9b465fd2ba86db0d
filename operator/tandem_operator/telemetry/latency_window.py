"""Latencies and lengths of the last minutes, of all gateways of a service together.

Increases between two looks are added up, and count half as much after a half-life: of seconds of traffic, so nothing is
forgotten while no metrics come.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem_operator.scaling.distribution import Distribution
from tandem_operator.scaling.load import PromptFigures, StepFigures
from tandem_operator.telemetry.arrival_gaps import ArrivalGaps, Arrivals
from tandem_operator.telemetry.latency_metrics import LatencyFactors, LatencyTotals, StepFit

ARRIVALS_S, LENGTHS_S, MEASURED_S, OBJECTIVES_S = 30.0, 300.0, 30.0, 150.0
"""Half-lives: of rates of arrivals, of lengths of prompts and outputs, of measured latencies, of objectives met."""

KNOWN_S = 60.0
"""After so much traffic the mean length of outputs is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What came to one gateway between two looks, or to all of them."""

    gateway: str = ""
    """Which one."""
    processes: int = 1
    """Of the gateway."""
    seconds: float
    choices: float
    requested_tokens: float
    predicted_tokens: float
    """Of those that were sent to a worker, tokens that it had cached."""
    latency: LatencyTotals


@dataclass(frozen=True, slots=True)
class Decoding:
    """What workers decode at one look."""

    running: float = 0.0
    """Sequences, of all workers together."""
    workers: float = 0.0
    fit: StepFit | None = None
    """None before a worker has measured its steps."""


@dataclass(kw_only=True, slots=True)
class _Sum:
    """Of traffic, with forgetting."""

    half_life_s: float
    seconds: float = 0.0
    choices: float = 0.0
    requested_tokens: float = 0.0
    predicted_tokens: float = 0.0
    latency: LatencyTotals = field(default_factory=LatencyTotals)
    steps: float = 0.0
    """Decode steps of one sequence: a step of several counts as often."""

    def take(self, traffic: Traffic, steps_per_s: float) -> None:
        kept = 0.5 ** (traffic.seconds / self.half_life_s)
        self.seconds = kept * self.seconds + traffic.seconds
        self.choices = kept * self.choices + traffic.choices
        self.requested_tokens = kept * self.requested_tokens + traffic.requested_tokens
        self.predicted_tokens = kept * self.predicted_tokens + traffic.predicted_tokens
        self.latency = self.latency.times(kept).plus(traffic.latency)
        self.steps = kept * self.steps + traffic.seconds * steps_per_s


@dataclass(kw_only=True, slots=True)
class LatencyWindow:
    """Of one service."""

    factors: LatencyFactors = field(default_factory=LatencyFactors)
    _arrivals: _Sum = field(default_factory=lambda: _Sum(half_life_s=ARRIVALS_S))
    _lengths: _Sum = field(default_factory=lambda: _Sum(half_life_s=LENGTHS_S))
    _measured: _Sum = field(default_factory=lambda: _Sum(half_life_s=MEASURED_S))
    _objectives: _Sum = field(default_factory=lambda: _Sum(half_life_s=OBJECTIVES_S))
    _gaps: ArrivalGaps = field(default_factory=ArrivalGaps)

    def take(self, traffic: Iterable[Traffic], factors: Iterable[LatencyFactors], decoding: Decoding) -> None:
        """What came to each gateway since the last look, and what runs now."""
        taken = list(traffic)
        if taken:
            latency = LatencyTotals()
            for one in taken:
                latency = latency.plus(one.latency)
            together = Traffic(
                seconds=max(one.seconds for one in taken),
                choices=sum(one.choices for one in taken),
                requested_tokens=sum(one.requested_tokens for one in taken),
                predicted_tokens=sum(one.predicted_tokens for one in taken),
                latency=latency,
            )
            for each in (self._arrivals, self._lengths, self._measured, self._objectives):
                each.take(together, self._steps_per_s(decoding))
            self._gaps.take(
                [Arrivals(t.gateway, t.seconds, t.choices, t.latency.gap_square_s, t.processes) for t in taken]
            )
        self.factors = LatencyFactors.together(factors)

    def prompts(self, step_base_s: float) -> PromptFigures | None:
        """None before a prompt has come."""
        lengths = self._lengths.latency.uncached
        if lengths is None or not lengths.count:
            return None
        known = lengths.sum + self._lengths.predicted_tokens
        share = lengths.sum / known if known else 1.0
        return PromptFigures(
            tokens=lengths,
            arrived_tokens_per_s=share * self._arrivals.requested_tokens / self._arrivals.seconds,
            arrivals_variation=self._gaps.variation,
            step_base_s=step_base_s,
            correction=self.factors.compute,
            margin=self.factors.ttft_margin,
            observed_s=self._lengths.seconds,
            measured_s=_some(self._measured.latency.ttft_s),
        )

    def steps(self, fit: StepFit | None) -> StepFigures | None:
        """None without a fit, and before an output has ended."""
        lengths, lately = self._lengths, self._arrivals
        if fit is None or not self._ended or not lengths.choices:
            return None
        return StepFigures(
            base_s=fit.base_s,
            sequence_s=fit.sequence_s,
            kv_token_s=fit.kv_token_s,
            context_tokens=self._context_tokens,
            served_per_s=lately.steps / lately.seconds,
            # At first only short outputs have ended.
            steps_each=lengths.steps / self._ended if lengths.seconds >= KNOWN_S else 0.0,
            arrived_per_s=lately.choices / lately.seconds,
            arrivals_variation=self._gaps.variation,
            correction=self.factors.itl,
            margin=self.factors.itl_margin,
            measured_s=_some(self._measured.latency.itl_s),
        )

    @property
    def judged(self) -> float:
        """Requests with objectives of the last minutes."""
        return self._objectives.latency.judged

    @property
    def attainment(self) -> float:
        """Share of them that met all of their objectives; 1 of none."""
        return min(1.0, self._objectives.latency.good / self.judged) if self.judged else 1.0

    @property
    def goodput_per_s(self) -> float:
        return self._objectives.latency.good / self._objectives.seconds if self._objectives.seconds else 0.0

    @property
    def _ended(self) -> float:
        """Outputs of the last minutes."""
        ttft_s = self._lengths.latency.ttft_s
        return 0.0 if ttft_s is None else ttft_s.count

    @property
    def _context_tokens(self) -> float:
        """Of a sequence, in the mean of its decode; 0 before one has ended."""
        lengths = self._lengths
        if not self._ended or not lengths.choices:
            return 0.0
        return lengths.requested_tokens / lengths.choices + lengths.latency.output_tokens / self._ended / 2

    def _steps_per_s(self, decoding: Decoding) -> float:
        """Those that are computed now."""
        if decoding.fit is None or not decoding.workers:
            return 0.0
        fit, batch = decoding.fit, decoding.running / decoding.workers
        step_s = fit.base_s + (fit.sequence_s + fit.kv_token_s * self._context_tokens) * max(1.0, batch)
        return decoding.running / (step_s * self.factors.itl)


def _some(values: Distribution | None) -> Distribution | None:
    return values if values is not None and values.count else None
