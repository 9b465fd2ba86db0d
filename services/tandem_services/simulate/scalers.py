"""Who decides how many workers there are, side by side: the operator's law, one like an HPA's, and nobody.

All see the same load at the same moments. The law is the operator's own code (`tandem_operator.scaling`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Protocol

from tandem_operator.api.roles import ROLES, RoleName
from tandem_operator.scaling.law import Memory, ScalingConfig, decide
from tandem_operator.scaling.load import Load
from tandem_operator.scaling.window import Window

Counts = dict[RoleName, int]

HPA_TOLERANCE = 0.1
HPA_DOWN_WINDOW_S = 300.0
"""Both as the HorizontalPodAutoscaler has them by default."""


class Scaler(Protocol):
    """Asked once a period."""

    def decide(self, load: Load, there: Mapping[RoleName, int]) -> tuple[Counts, int]:
        """Workers wanted of each role, and how many change from decode to prefill (negative: the other way)."""
        ...


@dataclass(slots=True)
class Law:
    """The operator's."""

    config: ScalingConfig
    _memory: Memory = field(default_factory=Memory)

    def decide(self, load: Load, there: Mapping[RoleName, int]) -> tuple[Counts, int]:
        outcome = decide(load, there, self._memory, self.config)
        self._memory = outcome.memory
        return dict(outcome.wanted), outcome.flips


@dataclass(slots=True)
class Hpa:
    """Each role for itself: replicas in proportion to a metric over its target, as Kubernetes computes it.

    The metric of prefill is queued tokens per worker, with the queue that a worker clears within the target time as
    its target; that of decode is the share of places in use.
    """

    config: ScalingConfig
    _windows: dict[RoleName, Window] = field(default_factory=dict)

    def decide(self, load: Load, there: Mapping[RoleName, int]) -> tuple[Counts, int]:
        prefill, decode = load.prefill, load.decode
        per_worker = prefill.worker_tokens_per_s * self.config.prefill.targets.queue_seconds
        ratios: dict[RoleName, float] = {
            "prefill": prefill.queued_tokens / max(1.0, per_worker * there["prefill"]),
            "decode": (decode.running + decode.waiting) / max(1.0, decode.worker_places * there["decode"]) / 0.8,
        }
        return {role: self._replicas(role, ratios[role], there[role], load.at) for role in ROLES}, 0

    def _replicas(self, role: RoleName, ratio: float, now: int, at: float) -> int:
        wished = now if abs(ratio - 1.0) <= HPA_TOLERANCE else ceil(now * ratio)
        bounds = self.config.bounds(role)
        wished = min(max(wished, bounds.least, 1), bounds.most)
        window = self._windows.get(role, Window()).add(at, wished, HPA_DOWN_WINDOW_S)
        self._windows[role] = window
        # At most double, or four more, in one period.
        return min(window.most(at, HPA_DOWN_WINDOW_S), max(now * 2, now + 4))


@dataclass(frozen=True, slots=True)
class Static:
    """As many as the fleet begins with."""

    def decide(self, load: Load, there: Mapping[RoleName, int]) -> tuple[Counts, int]:
        del load
        return {role: there[role] for role in ROLES}, 0
