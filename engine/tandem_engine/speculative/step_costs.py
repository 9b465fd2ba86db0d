"""What drafts cost on this machine, learned from the steps that were run.

A forward of more tokens takes longer, by almost nothing where weights must be read from memory for one request
alone, by almost as much as there are more tokens where many requests keep the arithmetic busy. So the price of
a draft, in plain decode steps, is measured apart for batches of about the same size:

    price = (seconds to propose one + seconds by which the verifying step is longer for it) / seconds of a plain step

Plain steps must be seen to compare with, so now and then a step of a batch that drafts goes without (`due`).
"""

from dataclasses import dataclass, field

WEIGHT = 0.1
"""Of the newest measurement in the moving means."""
UNKNOWN_PRICE = 0.1
"""Until a batch of about that size has been measured."""
STEPS_BETWEEN = 128
"""Steps with drafts after which a plain one of that size is measured again."""


@dataclass(slots=True)
class SizeCosts:
    """Moving means for batches of about one size."""

    plain_s: float = 0.0
    """A decode step without drafts."""
    draft_s: float = 0.0
    """Proposing and verifying one draft of every request."""
    until_plain: int = 0
    """Steps with drafts before a plain one is due."""


@dataclass(kw_only=True, slots=True)
class StepCosts:
    """Prices by batch size. Scheduler thread only."""

    _sizes: dict[int, SizeCosts] = field(default_factory=dict)

    def price(self, batch: int) -> float:
        """Of one draft for each of `batch` requests, in decode steps of that batch."""
        costs = self._of(batch)
        if costs.plain_s == 0.0 or costs.draft_s == 0.0:
            return UNKNOWN_PRICE
        return costs.draft_s / costs.plain_s

    def due(self, batch: int) -> bool:
        """Whether the next step had better go without drafts, to be measured."""
        return self._of(batch).until_plain <= 0

    def plain(self, batch: int, *, compute_s: float) -> None:
        """A decode step of `batch` requests took so long."""
        costs = self._of(batch)
        costs.plain_s = _mean(costs.plain_s, compute_s)
        costs.until_plain = STEPS_BETWEEN

    def drafted(self, batch: int, drafts: int, *, propose_s: float, longest: int, compute_s: float) -> None:
        """A step of `batch` requests proposed and verified `drafts`, in chains of up to `longest`."""
        costs = self._of(batch)
        costs.until_plain -= 1
        if costs.plain_s > 0.0:
            longer = max(0.0, compute_s - costs.plain_s) * batch / drafts
            costs.draft_s = _mean(costs.draft_s, longer + propose_s / longest)

    def _of(self, batch: int) -> SizeCosts:
        """Sizes between two powers of two are about the same."""
        return self._sizes.setdefault(batch.bit_length(), SizeCosts())


def _mean(mean: float, value: float) -> float:
    return value if mean == 0.0 else mean + WEIGHT * (value - mean)
