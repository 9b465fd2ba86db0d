"""How long a run may take: every stage has its share of what is left, and what it does not need goes to those after.

Nothing is waited for without a limit. After a stage's deadline no figure is begun; one that is being taken may last a
little longer, so the last stage ends at most `GRACE_S` after the run should.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

GRACE_S = 20.0
MIN_S = 1.0
Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadline:
    """When a stage should be over. Times are seconds of `clock`."""

    at: float
    answer_s: float
    """The most that one answer of an engine may take: what takes longer hangs."""
    clock: Clock = time.monotonic

    @property
    def left(self) -> float:
        return self.at - self.clock()

    @property
    def passed(self) -> bool:
        return self.left <= 0

    def wait_s(self, most: float | None = None) -> float:
        """How long to wait for an answer, or for `most` seconds at most for something else."""
        return max(MIN_S, min(self.answer_s if most is None else most, self.left + GRACE_S))


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimit:
    """Of a whole run."""

    ends: float
    answer_s: float
    clock: Clock = time.monotonic

    def stage(self, weight: float, later: float) -> Deadline:
        """Of a stage that begins now. `weight`: seconds that it should take; `later`: those of all stages after it."""
        now = self.clock()
        share = max(0.0, self.ends - now) * weight / (weight + later)
        return Deadline(at=now + share, answer_s=self.answer_s, clock=self.clock)
