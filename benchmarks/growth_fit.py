"""How a cost grows: its points, the power of its axis that it follows, whether that needs a reason. Not a command."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log

import numpy as np

SUPERLINEAR = 1.15
"""A power above this is more than linear, beyond what noise makes of a straight line."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One cost along one axis."""

    points: Mapping[float, float]
    """Axis → cost, both above 0."""
    unit: str
    reason: str = ""
    """Why it grows faster than the axis, where it may."""
    reason_power: float = 1.0
    """The power that the reason gives."""

    @property
    def power(self) -> float:
        """The p of cost ~ axis^p over the upper half of the axis, where what is constant weighs least."""
        known = sorted(self.points.items())
        upper = known[len(known) // 2 - (len(known) < 4) :]
        slope, _ = np.polyfit([log(x) for x, _ in upper], [log(y) for _, y in upper], 1)
        return round(float(slope), 2)

    @property
    def terms(self) -> list[float]:
        """(a, b, c) of the least relative error of a + b·x + c·x², none below 0: how much of it is quadratic."""
        return [float(f"{term:.3g}") for term in _nonnegative(self.points)]

    @property
    def superlinear(self) -> bool:
        return self.power > SUPERLINEAR

    @property
    def allowed(self) -> float:
        """The power of the axis, or of the reason, and noise."""
        return round(self.reason_power + SUPERLINEAR - 1.0, 2)

    @property
    def unexplained(self) -> bool:
        """Whether it grows faster than its axis, or than its reason explains, beyond noise."""
        return self.power > self.allowed

    def as_json(self) -> dict[str, object]:
        fields: dict[str, object] = {
            "unit": self.unit,
            "points": {f"{x:g}": float(f"{y:.4g}") for x, y in sorted(self.points.items())},
            "power": self.power,
            "allowed": self.allowed,
            "terms": self.terms,
        }
        return fields | ({"reason": self.reason} if self.superlinear and self.reason else {})


def _nonnegative(points: Mapping[float, float]) -> list[float]:
    """Terms of all subsets of {1, x, x²} that fit without a negative one: those of the least relative error."""
    xs, ys = np.array(list(points)), np.array(list(points.values()))
    columns = np.stack([np.ones_like(xs), xs, xs**2], axis=1) / ys[:, None]
    best, least = [0.0, 0.0, 0.0], float("inf")
    for chosen in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
        found, *_ = np.linalg.lstsq(columns[:, chosen], np.ones_like(ys), rcond=None)
        error = float(((columns[:, chosen] @ found - 1) ** 2).sum())
        if found.min() >= 0 and error < least:
            best, least = [0.0, 0.0, 0.0], error
            for place, term in zip(chosen, found, strict=True):
                best[place] = float(term)
    return best
