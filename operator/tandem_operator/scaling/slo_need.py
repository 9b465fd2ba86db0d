"""The number of workers that meets latency objectives, with the signatures of `load`. Pure.

    prefill   the least n with which the percentile of the prompts waits and is computed within the objective. Waits are
              those of a queue before n workers (`queueing`), computing takes the prompt's tokens / tokens per second
    decode    the least n whose batches are at most b*, the largest whose step is within the objective, but for peaks
              beyond the percentile; or sequences / those that fit into the KV pages of a worker

Both depend on arrivals, not on the present number of workers: n - 1 workers are judged with all of the load, so that
the remaining workers can take over the leaving one's share. A sequence takes longer in a larger batch, and there
are more of them at once; the headroom is what their number varies by.

More workers do not compute a prompt faster. Where prompts are too long by themselves, and where a step with one
sequence is too long, the objective is infeasible: the need says so, and its number is that of the load alone.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, floor, inf, sqrt
from statistics import NormalDist

from tandem_operator.scaling import load as by_load
from tandem_operator.scaling.load import DecodeLoad, Need, PrefillLoad, PromptFigures, StepFigures, Targets
from tandem_operator.scaling.queueing import Queue, Waits

MIN_PROMPTS = 20
"""Prompts before their lengths are known, unless fewer came in `OBSERVED_S`."""

OBSERVED_S = 300.0

MAX_VARIATION = 10.0
"""Greater variation of arrivals or lengths is a change of the load, not a property of it."""

NO_WAIT = Waits(0.0, 0.0)
MAX_WORKERS = 1_000
BISECTIONS = 24

MAX_DELAY = 4.0
"""Sequences that come delay the others at most so much: more is a fit without a base."""


def prefill_need(load: PrefillLoad, targets: Targets) -> Need:
    """As `load.prefill_need`, for `targets.latency_s`, which is not None."""
    assert targets.latency_s is not None, "only for roles with an objective"
    plain, prompts = by_load.prefill_need(load, targets), load.prompts
    if load.worker_tokens_per_s <= 0:
        return plain
    if prompts is None or (prompts.tokens.count < MIN_PROMPTS and prompts.observed_s < OBSERVED_S):
        is_idle = load.queued_tokens == 0 and load.arrived_tokens_per_s == 0
        reason = f"lengths of prompts are not known yet; {plain.reason}"
        return replace(plain, reason=reason, lacks_figures=not is_idle)
    fleet = _Prefill(prompts, load.worker_tokens_per_s, targets.latency_s, targets.percentile)
    if not fleet.is_feasible():
        return replace(plain, infeasible=fleet.obstacle())
    offered = fleet.offered(load, targets)
    workers = _workers(fleet, offered)
    return Need(
        workers=workers,
        reason=(
            f"{prompts.arrived_tokens_per_s:.0f} tokens/s come and {load.queued_tokens:.0f} are queued; "
            f"{fleet.describe(max(1, ceil(workers)), offered)}"
        ),
    )


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Prefill workers with one objective."""

    prompts: PromptFigures
    tokens_per_s: float
    ttft_s: float
    percentile: float

    def offered(self, load: PrefillLoad, targets: Targets) -> float:
        """Load in workers: what comes, and what clears the backlog."""
        steady = self.prompts.arrived_tokens_per_s
        # What waits no longer than the objective leaves to a mean prompt is no backlog: the model expects it.
        allowed_s = max(targets.queue_seconds, self.ttft_s - self.compute_s(self.prompts.tokens.mean))
        backlog = max(0.0, load.queued_tokens - steady * allowed_s)
        return (steady + backlog / targets.clear_seconds) * self._token_s * (1 + self._base_share)

    def compute_s(self, tokens: float) -> float:
        """Of one prompt."""
        return tokens * self._token_s + self.prompts.step_base_s

    def is_feasible(self) -> bool:
        """Whether enough prompts are computed in time when nothing is ahead of them."""
        return self._within(NO_WAIT) >= self.percentile

    def obstacle(self) -> str:
        """Why it is not."""
        tokens = self.prompts.tokens.quantile(self.percentile)
        longest = max(0.0, (self.ttft_s - self.prompts.step_base_s) / self._token_s)
        return (
            f"{self.percentile:g} of the prompts have up to {tokens:.0f} tokens to compute, which takes a worker "
            f"{self.compute_s(tokens):.2f} s without any wait; within {self.ttft_s:g} s it computes {longest:.0f}"
        )

    def attains(self, workers: int, offered: float) -> bool:
        """Whether so many workers meet the objective under this load."""
        if offered >= workers:
            return False
        return self._within(self._queue(workers, offered).waits()) >= self.percentile

    def describe(self, workers: int, offered: float) -> str:
        """Waits with so many workers."""
        wait_s = self._queue(workers, offered).waits().quantile(self.percentile) * self.prompts.margin
        tokens = self.prompts.tokens.quantile(self.percentile)
        return (
            f"{self.percentile:g} of the prompts wait at most {wait_s:.2f} s for {workers} workers, and are computed "
            f"in {self.compute_s(tokens):.2f} s of {self.ttft_s:g} s"
        )

    @property
    def _token_s(self) -> float:
        return self.prompts.correction / self.tokens_per_s

    @property
    def _base_share(self) -> float:
        """Of the time of a mean prompt, what its step takes whatever it computes, over the rest."""
        return self.prompts.step_base_s / (max(1.0, self.prompts.tokens.mean) * self._token_s)

    def _queue(self, workers: int, offered: float) -> Queue:
        return Queue(
            workers=workers,
            load=min(offered, workers * 0.999),
            service_s=self.compute_s(self.prompts.tokens.mean),
            arrivals_variation=min(self.prompts.arrivals_variation, MAX_VARIATION),
            service_variation=min(self.prompts.tokens.squared_variation, MAX_VARIATION),
        )

    def _within(self, waits: Waits) -> float:
        """Share of prompts that wait and are computed in time."""
        return sum(
            share * waits.share_within((self.ttft_s - self.compute_s(tokens)) / self.prompts.margin)
            for tokens, share in self.prompts.tokens.points()
        )


def _workers(fleet: _Prefill, offered: float) -> float:
    """The least sufficient number n, not rounded: by the place of the load between what n - 1 and n workers sustain."""
    least = floor(offered) + 1
    if least > MAX_WORKERS:
        return offered
    # Beyond that no request waits, and more workers change nothing.
    most = min(MAX_WORKERS, least + ceil(8 * sqrt(offered) + 8))
    enough = next((workers for workers in range(least, most + 1) if fleet.attains(workers, offered)), most)
    return _between(enough, offered, _bearable(fleet, enough - 1), _bearable(fleet, enough))


def _between(enough: int, offered: float, below: float, above: float) -> float:
    """The number that sustains `offered`, where `enough` sustain `above`, and one worker less sustains `below`."""
    if above <= below:
        return float(enough)
    return enough - 1 + min(1.0, max(0.0, (offered - below) / (above - below)))


def _bearable(fleet: _Prefill, workers: int) -> float:
    """The greatest load with which so many workers meet the objective."""
    return _greatest(float(workers), lambda load: fleet.attains(workers, load)) if workers else 0.0


def _greatest(bound: float, is_allowed: Callable[[float], bool]) -> float:
    """The greatest value up to `bound` that is allowed, where all lower ones are."""
    low, high = 0.0, bound
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_allowed(middle) else (low, middle)
    return low


def decode_need(load: DecodeLoad, targets: Targets) -> Need:
    """As `load.decode_need`, for `targets.latency_s`, which is not None."""
    assert targets.latency_s is not None, "only for roles with an objective"
    plain, steps = by_load.decode_need(load, targets), load.steps
    if load.worker_places <= 0 or load.worker_pages <= 0:
        return plain
    if steps is None:
        is_idle = load.running + load.waiting + load.arrived_per_s == 0
        reason = f"durations of decode steps are not known yet; {plain.reason}"
        return replace(plain, reason=reason, lacks_figures=not is_idle)
    batch = largest_batch(steps, load.worker_places, targets.latency_s)
    if batch < 1:
        alone_s = steps.step_s(1) * steps.margin
        return replace(
            plain,
            infeasible=f"a step with one sequence takes {alone_s:.4f} s, and the objective is {targets.latency_s:g} s",
        )
    return _for_batch(load, targets, steps, batch)


def _for_batch(load: DecodeLoad, targets: Targets, steps: StepFigures, batch: int) -> Need:
    """Where batches may be so large. Fewer sequences may fit into the memory of a worker."""
    pages_each = load.used_pages / load.running if load.running else 0.0
    in_memory = load.worker_pages * targets.kv_usage / pages_each if pages_each else inf
    step_s = steps.step_s(max(1.0, min(batch, in_memory)))
    offered = max(steps.served_per_s, steps.arrived_per_s * steps.steps_each)
    seconds_each = steps.steps_each * step_s or load.seconds_each
    offered += by_load.clearing_sequences(load, steps.arrived_per_s, seconds_each, targets) / step_s
    by_pages = offered * step_s / in_memory
    by_batch = Decode(steps, batch, targets.percentile).workers(offered)
    if by_pages > by_batch:
        return by_load.pages_need(load, by_pages)
    return Need(
        workers=by_batch,
        reason=(
            f"{load.running:.0f} run and {load.waiting:.0f} wait, {steps.arrived_per_s:.1f} per second come; steps of "
            f"{batch} sequences on a worker with {load.worker_places:.0f} places take "
            f"{steps.step_s(batch) * steps.margin:.4f} s"
        ),
    )


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode workers with one objective. Load is counted in steps of one sequence per second: unlike the number of
    sequences at once, it does not depend on the number of workers.
    """

    steps: StepFigures
    batch: int
    """The largest that meets the objective."""
    percentile: float

    def workers(self, offered: float) -> float:
        """The least sufficient number n, not rounded, as of prefill."""
        if offered >= self.bearable(MAX_WORKERS):
            return offered * self.steps.step_s(self.batch) / self.batch
        enough = 1 + bisect_left(range(1, MAX_WORKERS), offered, key=self.bearable)
        return _between(enough, offered, self.bearable(enough - 1), self.bearable(enough))

    def bearable(self, workers: int) -> float:
        """The greatest load with which the batch of so many workers is larger only beyond the percentile."""
        if not workers:
            return 0.0
        bound = float(workers * self.batch)
        sequences = _greatest(bound, lambda mean: mean + self._headroom(mean, mean / workers) <= bound)
        return sequences / self.steps.step_s(sequences / workers)

    def _headroom(self, sequences: float, batch: float) -> float:
        """By how much the number at once exceeds its mean at the percentile.

        As in a system without a queue, where sequences that come delay the others: the variance is greater by the
        duration of a step over the part of it that does not depend on the batch.
        """
        variation = min(self.steps.arrivals_variation, MAX_VARIATION)
        step_s = self.steps.step_s(batch)
        delay = step_s / max(self.steps.step_s(0), step_s / MAX_DELAY)
        peakedness = max(0.0, 1 + (variation - 1) / 2) * delay
        return max(0.0, NormalDist().inv_cdf(self.percentile)) * sqrt(sequences * peakedness)


def largest_batch(steps: StepFigures, places: float, itl_s: float) -> int:
    """Sequences of one worker whose step is within the objective, at most its places; 0 if even one is too many."""
    each = steps.step_s(1) - steps.step_s(0)
    left = itl_s / steps.margin - steps.step_s(0)
    if left < 0:
        return 0
    # The step with exactly so many may have a rounding error.
    return floor(min(places, left / each + 1e-6)) if each > 0 else floor(places)
