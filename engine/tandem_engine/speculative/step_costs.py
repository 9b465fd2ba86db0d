"""What decode steps cost with drafts and without, learned from the steps that were run.

    seconds of a step
        │              ╱  fixed_s + draft_s · drafts of the step
        │        ·  ╱·
        │      · ╱ ·          with drafts: proposing, the longer forward, and the overlap that is lost
        │     ╱·
        │ ────────────────    plain_s: without
        └────────────────── drafts

A forward of more tokens takes longer, by almost nothing where weights must be read from memory for one request
alone, by almost as much as there are more tokens where many requests keep the arithmetic busy. So batches of
about the same size have means of their own, and the line is fitted to steps of that size. Where all steps had
equally many drafts, which tells no slope, it is the line through the plain steps.

Only ratios matter, and the two kinds are seldom measured at the same time. What makes all steps slower for a while,
another process or a lower clock, is therefore kept apart as the pace of the moment, by which measurements are divided.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

LEAST_WEIGHT = 0.1
"""Of the newest measurement in the moving means; the n-th weighs 1 / n until that is less."""
PACE_WEIGHT = 0.3
"""And in the pace."""
OUTLIER = 0.5
"""Of what was expected, by which a measurement may differ: a machine that was busy elsewhere says little."""
ASSUMED_DRAFT = 0.1
"""Plain steps that a draft of every request costs, until a batch of about that size has been measured."""
RIDGE = 0.25
"""Spread of drafts per request, squared, below which the slope is rather that of the line through plain steps."""


class StepPrices(NamedTuple):
    """Of steps of one batch. Units are common to the three."""

    plain: float
    fixed: float
    """Of a step with drafts, before the first."""
    draft: float
    """Of each draft."""


@dataclass(slots=True)
class PlainSteps:
    """Moving mean of steps without drafts."""

    seconds: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        """A step took so long."""
        self.count += 1
        self.seconds += _weight(self.count) * (_likely(seconds, self.seconds) - self.seconds)


@dataclass(slots=True)
class DraftedSteps:
    """Moving moments of steps with drafts: drafts per request (x) and seconds (y)."""

    drafts: float = 0.0
    seconds: float = 0.0
    spread: float = 0.0
    """Variance of x."""
    together: float = 0.0
    """Covariance of x and y."""
    count: int = 0

    def add(self, drafts: float, seconds: float, *, plain_s: float) -> None:
        """A step had so many drafts per request and took so long, and one without takes `plain_s`."""
        x = drafts - self.drafts
        y = _likely(seconds, self.expected(drafts, plain_s)) - self.seconds
        self.count += 1
        weight = _weight(self.count)
        self.drafts += weight * x
        self.seconds += weight * y
        self.spread = (1.0 - weight) * (self.spread + weight * x * x)
        self.together = (1.0 - weight) * (self.together + weight * x * y)

    def expected(self, drafts: float, plain_s: float) -> float:
        """Seconds of a step with so many drafts per request; 0 when nothing is known."""
        return self.seconds + self.slope(plain_s) * (drafts - self.drafts) if self.count else 0.0

    def slope(self, plain_s: float) -> float:
        """Seconds by which one draft more per request prolongs a step; a step never costs less than a plain one."""
        through_plain = max(0.0, self.seconds - plain_s) / self.drafts
        fitted = (self.together + RIDGE * through_plain) / (self.spread + RIDGE)
        return min(max(0.0, fitted), through_plain)


@dataclass(slots=True)
class SizeCosts:
    """What is known of batches of about one size."""

    plain: PlainSteps = field(default_factory=PlainSteps)
    drafted: DraftedSteps = field(default_factory=DraftedSteps)
    pace: float = 1.0
    """Seconds that a second of the means takes at present."""

    def add_plain(self, seconds: float) -> None:
        expected = self.plain.seconds
        self.plain.add(seconds / self.pace)
        self._keep_pace(seconds, expected)

    def add_drafted(self, drafts: float, seconds: float) -> None:
        expected = self.drafted.expected(drafts, self.plain.seconds)
        self.drafted.add(drafts, seconds / self.pace, plain_s=self.plain.seconds)
        self._keep_pace(seconds, expected)

    def _keep_pace(self, seconds: float, expected: float) -> None:
        """`expected` at pace 1; 0 when nothing was."""
        if expected > 0.0:
            self.pace += PACE_WEIGHT * (_likely(seconds / expected, self.pace) - self.pace)

    def prices(self, batch: int) -> StepPrices:
        plain_s, drafted = self.plain.seconds, self.drafted
        if plain_s == 0.0 or drafted.seconds == 0.0:
            return StepPrices(plain=1.0, fixed=1.0, draft=ASSUMED_DRAFT / batch)
        slope = drafted.slope(plain_s)
        fixed = max(plain_s, drafted.seconds - slope * drafted.drafts)
        return StepPrices(plain=plain_s, fixed=fixed, draft=slope / batch)


@dataclass(kw_only=True, slots=True)
class StepCosts:
    """Costs by batch size. Scheduler thread only."""

    _sizes: dict[int, SizeCosts] = field(default_factory=dict)

    def prices(self, batch: int) -> StepPrices:
        """Of steps of `batch` requests; in plain steps as long as nothing is known."""
        return self._of(batch).prices(batch)

    def plain(self, batch: int, seconds: float) -> None:
        """A step of `batch` requests without drafts took so long."""
        self._of(batch).add_plain(seconds)

    def drafted(self, batch: int, drafts: int, seconds: float) -> None:
        """A step of `batch` requests that verified `drafts` took so long, proposing them included."""
        self._of(batch).add_drafted(drafts / batch, seconds)

    def _of(self, batch: int) -> SizeCosts:
        return self._sizes.setdefault(size_class(batch), SizeCosts())


def size_class(batch: int) -> int:
    """Sizes between two powers of two are about the same."""
    return batch.bit_length()


def _weight(count: int) -> float:
    return max(LEAST_WEIGHT, 1.0 / count)


def _likely(seconds: float, expected: float) -> float:
    """`seconds`, or what is nearest to it of what can be believed. Anything can be, where nothing is expected."""
    if expected == 0.0:
        return seconds
    return min(max(seconds, (1.0 - OUTLIER) * expected), (1.0 + OUTLIER) * expected)
