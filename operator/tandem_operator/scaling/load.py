"""The load of a service as the autoscaler sees it, and the number of workers that it needs. Pure.

Units do not depend on the size of the model. The need has neither memory nor limits (`scaling.policy` adds both):

    prefill   (arriving tokens per second + backlog / clear time) / tokens per second of a worker
    decode    the greater of   (concurrent sequences + what clears the waiting ones) / sequence slots of a worker
              and              KV pages in use / (pages of a worker x target usage)

Concurrent sequences are the arrivals per second times the duration of a decode (Little's law), or the running sequences
if these are more. Backlog is what waits longer than the target time. It should be cleared within the clear time, which
is about the start time of a pod: cleared faster, the backlog would be gone before the pods requested for it start.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from tandem_operator.scaling.distribution import Distribution

STALE_S = 15.0
"""Figures older than this count as absent: fifteen heartbeats of the workers, three periods of ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFigures:
    """Prompts of the last minutes, for objectives of the time to the first token."""

    tokens: Distribution
    """Of each prompt, without its cached prefix."""
    arrived_tokens_per_s: float
    """Without cached prefixes, in the mean of about a minute: variation within it is part of the model of waits."""
    arrivals_variation: float
    """Squared coefficient of variation of the times between arrivals."""
    step_base_s: float
    """What a step takes whatever it computes."""
    correction: float = 1.0
    """Measured over predicted time of computing a prompt."""
    margin: float = 1.0
    """Of the wait, for what the model does not describe."""
    observed_s: float = 0.0
    """For how long prompts have been counted, without what is forgotten."""
    measured_s: Distribution | None = None
    """Times to the first token of the last minute; None before there are any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """Duration of decode steps, for objectives of the time between tokens."""

    base_s: float
    sequence_s: float
    """For each sequence in the step."""
    kv_token_s: float
    """For each token of context of these sequences."""
    context_tokens: float
    """Of a sequence, in the mean of its decode."""
    served_per_s: float
    """Steps of one sequence that are computed per second, in the mean of about a minute: variation within it is part of
    the headroom."""
    steps_each: float
    """Of one sequence, in the mean of minutes; 0: not known yet."""
    arrived_per_s: float
    """Sequences, in the mean of about a minute."""
    arrivals_variation: float = 1.0
    """As of `PromptFigures`."""
    correction: float = 1.0
    """Measured over predicted time between tokens."""
    margin: float = 1.0
    """Of that time, for what the model does not describe."""
    measured_s: Distribution | None = None
    """Times between tokens of the last minute; None before there are any."""

    def step_s(self, sequences: float) -> float:
        """With so many sequences, corrected."""
        each = self.sequence_s + self.kv_token_s * self.context_tokens
        return (self.base_s + each * sequences) * self.correction


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillLoad:
    """Prompts to compute, over all prefill workers."""

    queued_tokens: float
    """Tokens without a cached prefix that wait, at workers and in gateways."""
    oldest_wait_s: float
    """How long the first of them has waited."""
    arrived_tokens_per_s: float
    """Tokens without a cached prefix that came lately."""
    worker_tokens_per_s: float
    """What one busy worker computes."""
    prompts: PromptFigures | None = None
    """None before there are any, and of gateways of releases that do not report them."""
    serving: float | None = None
    """Workers that run, of all that were ordered; None: not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeLoad:
    """Sequences to generate, over all decode workers."""

    running: float
    """Sequences that decode."""
    waiting: float
    """Sequences that wait for a place or for KV pages, at workers and in gateways."""
    oldest_wait_s: float
    """How long the first of them has waited."""
    arrived_per_s: float
    """Sequences that came lately."""
    seconds_each: float
    """How long one decodes, on average."""
    worker_places: float
    """Sequences that one worker decodes at once."""
    used_pages: float
    """KV pages that running sequences hold; what is only cached does not count."""
    worker_pages: float
    """KV pages of one worker."""
    steps: StepFigures | None = None
    """None before a worker has measured its steps."""
    serving: float | None = None
    """As of prefill."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """One look at the service."""

    at: float
    """Seconds, monotonic."""
    age_s: float
    """Age of its oldest metric, in seconds."""
    prefill: PrefillLoad
    decode: DecodeLoad
    held: float = 0.0
    """Requests that gateways hold because there is no worker."""
    is_calibrated: bool = True
    """Whether predicted latencies are near measured ones."""

    def error(self) -> str:
        """Why the load is not reliable; empty if it is."""
        if self.age_s > STALE_S:
            return f"metrics are {self.age_s:.0f} s old"
        for role, part in (("prefill", self.prefill), ("decode", self.decode)):
            for name, value in _numbers(part):
                if not math.isfinite(value) or value < 0:
                    return f"{role} {name} is {value}"
        return ""

    @property
    def idle(self) -> bool:
        """Nothing runs and no request waits."""
        return (
            self.held == 0
            and self.prefill.queued_tokens == 0
            and self.prefill.arrived_tokens_per_s == 0
            and self.decode.running == 0
            and self.decode.waiting == 0
        )


def _numbers(part: Any) -> Iterator[tuple[str, float]]:
    """All numbers of a part, by name."""
    for item in fields(part):
        value = getattr(part, item.name)
        if is_dataclass(value):
            yield from _numbers(value)
        elif isinstance(value, tuple):
            yield from ((item.name, one) for one in value)
        elif value is not None:
            yield item.name, value


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Workers, not rounded, and why."""

    workers: float
    reason: str
    lacks_figures: bool = False
    """What would show that fewer workers suffice is not known: none is removed."""
    infeasible: str = ""
    """Why no number of workers meets the latency objective; empty if some number does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """Of one role."""

    queue_seconds: float
    """What waits so long is no backlog."""
    kv_usage: float
    """Share of the KV pages that may be in use."""
    clear_seconds: float = 30.0
    """A backlog is to be gone within this time."""
    latency_s: float | None = None
    """Objective: of prefill the time to the first token, of decode that between tokens. None: the role has none."""
    percentile: float = 0.95
    """Share of requests that are to meet it."""


def prefill_need(load: PrefillLoad, targets: Targets) -> Need:
    """0 workers when nothing comes and nothing waits. One when no rate was measured yet and something waits."""
    if load.worker_tokens_per_s <= 0:
        waits = load.queued_tokens > 0
        return Need(workers=float(waits), reason="no rate measured yet" if waits else "idle")
    backlog = max(0.0, load.queued_tokens - load.arrived_tokens_per_s * targets.queue_seconds)
    demand = load.arrived_tokens_per_s + backlog / targets.clear_seconds
    return Need(
        workers=demand / load.worker_tokens_per_s,
        reason=(
            f"{load.arrived_tokens_per_s:.0f} tokens/s come, {load.queued_tokens:.0f} are queued, the oldest for "
            f"{load.oldest_wait_s:.1f} s; a worker computes {load.worker_tokens_per_s:.0f} tokens/s"
        ),
    )


def clearing_sequences(load: DecodeLoad, arrived_per_s: float, seconds_each: float, targets: Targets) -> float:
    """Sequences to decode at once beside those that arrive, so that the backlog is gone after `clear_seconds`."""
    backlog = max(0.0, load.waiting - arrived_per_s * targets.queue_seconds)
    return backlog * min(1.0, seconds_each / targets.clear_seconds)


def pages_need(load: DecodeLoad, workers: float) -> Need:
    """Where memory decides."""
    share = load.used_pages / load.worker_pages
    return Need(workers=workers, reason=f"KV pages of {share:.2f} workers in use, {load.waiting:.0f} wait")


def decode_need(load: DecodeLoad, targets: Targets) -> Need:
    """As `prefill_need`, by places and by memory."""
    if load.worker_places <= 0 or load.worker_pages <= 0:
        waits = load.running + load.waiting > 0
        return Need(workers=float(waits), reason="no size measured yet" if waits else "idle")
    at_once = max(load.running, load.arrived_per_s * load.seconds_each)
    clearing = clearing_sequences(load, load.arrived_per_s, load.seconds_each, targets)
    by_places = (at_once + clearing) / load.worker_places
    by_pages = load.used_pages / (load.worker_pages * targets.kv_usage)
    if load.running:
        # Waiting requests will hold as many pages as running ones.
        by_pages *= (at_once + clearing) / load.running
    if by_pages > by_places:
        return pages_need(load, by_pages)
    return Need(
        workers=by_places,
        reason=(
            f"{load.running:.0f} run and {load.waiting:.0f} wait, {load.arrived_per_s:.1f} per second come; "
            f"a worker has {load.worker_places:.0f} places"
        ),
    )
