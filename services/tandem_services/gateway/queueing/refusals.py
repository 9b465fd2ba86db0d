"""What a client is told whose request gets no worker: why, and when to try again."""

from collections import deque
from dataclasses import dataclass, field

from tandem_engine.clock import Clock
from tandem_services.common.errors import ApiError, unavailable
from tandem_services.gateway.queueing.visitor import Verdict

MOST_RETRY_S = 30.0
NO_WORKER_RETRY_S = 2.0
"""A worker that just vanished is back, or replaced by another, after about this long at best."""
PACE_SAMPLES = 32
"""Admissions from the queue that its pace is measured by."""


@dataclass(kw_only=True, slots=True)
class Pace:
    """How fast a queue admits."""

    clock: Clock
    _admitted_at: deque[float] = field(default_factory=lambda: deque(maxlen=PACE_SAMPLES))

    def admitted(self) -> None:
        """Somebody who waited has workers."""
        self._admitted_at.append(self.clock.now())

    def wait_s(self, waiting: int) -> float:
        """Until so many have been admitted, at the present pace: 1 to `MOST_RETRY_S`."""
        if len(self._admitted_at) < 2:
            return 1.0
        elapsed = max(self.clock.now() - self._admitted_at[0], 1e-3)
        return min(max(waiting * elapsed / len(self._admitted_at), 1.0), MOST_RETRY_S)


def refusal(reason: str, *, no_workers: bool, wait_s: float) -> ApiError:
    """503, or 429 for who was pushed out. `reason`: as `Observer.refused` has it. `wait_s`: until there may be room."""
    if reason == Verdict.NO_WORKER.value or no_workers:
        return unavailable("No worker can take the request now. Try again later.", retry_after=NO_WORKER_RETRY_S)
    if reason == "pushed_out":
        return ApiError(
            429,
            "Your requests fill the queue. Try again later, or send fewer at once.",
            kind="RateLimitError",
            reason="queue_full",
            retry_after=wait_s,
        )
    return unavailable("All workers are at their limit. Try again later.", retry_after=wait_s)
