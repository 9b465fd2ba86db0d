"""Needs over time: more workers only for what lasts, fewer only when fewer would have done all along."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    workers: int
    need: float = 0.0
    """Before it was rounded."""
    arrivals: float = 0.0
    """Per second, in the role's own unit."""


@dataclass(frozen=True, slots=True)
class Window:
    """Samples, oldest first, as far back as any window reaches."""

    samples: tuple[Sample, ...] = ()

    def add(self, at: float, workers: int, reach_s: float, need: float = 0.0, arrivals: float = 0.0) -> "Window":
        """With a new sample, and of those older than `reach_s` only the last, which says how it was at that time."""
        recent = [one for one in self.samples if one.at > at - reach_s]
        older = [one for one in self.samples if one.at <= at - reach_s][-1:]
        return Window((*older, *recent, Sample(at, workers, need, arrivals)))

    def lasting(self, at: float, window_s: float) -> int:
        """Workers that were needed at every moment of the window. The newest sample is always in it."""
        return min(one.workers for one in self._within(at, window_s))

    def most(self, at: float, window_s: float) -> int:
        """Workers that were needed at some moment of it."""
        return max(one.workers for one in self._within(at, window_s))

    def peak(self, at: float, window_s: float) -> float:
        """The same, not rounded."""
        return max(one.need for one in self._within(at, window_s))

    def busiest(self, at: float, window_s: float) -> float:
        """Most arrivals per second."""
        return max(one.arrivals for one in self._within(at, window_s))

    def covers(self, at: float, window_s: float) -> bool:
        """Whether samples reach back to its beginning."""
        return bool(self.samples) and self.samples[0].at <= at - window_s

    def _within(self, at: float, window_s: float) -> Iterable[Sample]:
        return [one for one in self.samples if one.at >= at - window_s]
