"""What the autoscaler knows of a service at one moment, in units that do not depend on the model's size."""

import math
from dataclasses import dataclass, fields

STALE_S = 15.0
"""Figures older than this count as absent: fifteen heartbeats of the workers, three periods of ours."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """One look at the service."""

    at: float
    """Seconds, monotonic."""
    age_s: float
    """How old the oldest figure in it is."""
    prefill: PrefillLoad
    decode: DecodeLoad
    held: float = 0.0
    """Requests that gateways hold because no worker is there."""

    def trouble(self) -> str:
        """Why it cannot be trusted; empty when it can."""
        if self.age_s > STALE_S:
            return f"metrics are {self.age_s:.0f} s old"
        for role, part in (("prefill", self.prefill), ("decode", self.decode)):
            for item in fields(part):
                value = getattr(part, item.name)
                if not math.isfinite(value) or value < 0:
                    return f"{role} {item.name} is {value}"
        return ""

    @property
    def idle(self) -> bool:
        """Nothing runs and nobody waits."""
        return (
            self.held == 0
            and self.prefill.queued_tokens == 0
            and self.prefill.arrived_tokens_per_s == 0
            and self.decode.running == 0
            and self.decode.waiting == 0
        )
