"""What comes per second, from what the counters of gateways have gained."""

from collections.abc import Iterable
from dataclasses import dataclass

from tandem_operator.telemetry.figures import GatewayTotals

SMOOTHING = 0.3
"""Weight of the newest look in means over looks."""
FIRST_SECONDS_EACH = 10.0
"""How long a sequence decodes, before anybody has ended. It does not matter for long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """Of one gateway between two looks."""

    totals: GatewayTotals
    seconds: float
    waiting_tokens: float
    """By how much its queue has grown; negative: shrunk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Of all gateways together."""

    tokens_per_s: float
    """Prompt tokens without a cached prefix."""
    choices_per_s: float
    seconds_each: float
    """How long a choice decodes."""
    uncached_share: float
    """Of prompt tokens."""


@dataclass(kw_only=True, slots=True)
class Demand:
    """Means over looks."""

    seconds_each: float = FIRST_SECONDS_EACH
    cached_share: float = 0.0

    def take(self, gains: Iterable[Gain]) -> None:
        """The gains of one look."""
        taken = list(gains)
        ended = sum(gain.totals.finished for gain in taken)
        first = sum(gain.totals.first_tokens for gain in taken)
        if ended and first:
            whole = sum(gain.totals.finished_s for gain in taken) / ended
            before = sum(gain.totals.first_token_s for gain in taken) / first
            self.seconds_each += SMOOTHING * (max(0.0, whole - before) - self.seconds_each)
        # What came and does not wait has got a worker, and a prediction of what that one has cached.
        admitted = sum(gain.totals.asked_tokens - gain.waiting_tokens for gain in taken)
        if admitted > 0:
            share = min(1.0, sum(gain.totals.predicted_tokens for gain in taken) / admitted)
            self.cached_share += SMOOTHING * (share - self.cached_share)

    def rates(self, gains: Iterable[Gain]) -> Rates:
        """From the last gain of each gateway."""
        taken = list(gains)
        uncached = 1.0 - self.cached_share
        return Rates(
            tokens_per_s=sum(gain.totals.asked_tokens / gain.seconds for gain in taken) * uncached,
            choices_per_s=sum(gain.totals.choices / gain.seconds for gain in taken),
            seconds_each=self.seconds_each,
            uncached_share=uncached,
        )
