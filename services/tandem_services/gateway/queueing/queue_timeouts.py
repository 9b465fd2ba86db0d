"""How long a queued request waits: for capacity, for a worker, and for workers that start.

capacity    `room_s` from its arrival, or from when there was a worker again
a worker    `worker_s` from its arrival, or from when the last worker of a role left, or when there was one again
a start     longer, while workers of all lacking roles start, and `worker_s` after their last report: one that was
            seen to start a moment ago may have registered since. `start_s` altogether
"""

from dataclasses import dataclass
from math import inf

from tandem_engine.base.clock import Clock
from tandem_services.common.recording import estimating, recording
from tandem_services.gateway.queueing.worker_starts import MIN_S, WorkerStarts
from tandem_services.router.decision import RouteDecision


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionPolicy:
    """How long a new request waits, and for what."""

    room_s: float = 60.0
    """For room while there are workers."""
    worker_s: float = 9.0
    """For a worker while none can take it, and none starts that could."""
    start_s: float = 120.0
    """For workers that start: as long as clients and proxies mostly stand."""
    worker_wait_s: float = 1.0
    """Predicted wait for other prompts at a worker that still counts as having capacity."""
    poll_s: float = 0.1


@dataclass(kw_only=True, slots=True)
class QueueTimeouts:
    """Of one queue."""

    clock: Clock
    policy: AdmissionPolicy
    starts: WorkerStarts | None
    """None: workers that start are not known."""
    lacking_since: float | None = None
    """Since when no worker is offered, or none of a role."""
    _available_since: float = -inf
    """When that last ended."""

    @estimating(lambda _: False)
    def lacks_a_role(self) -> bool:
        """Whether no worker of some role is offered, where that is known."""
        return self.starts is not None and bool(self.starts.lacking())

    def note(self, *, lacking: bool) -> bool:
        """Call in each turn. `lacking`: there is no worker, or none of a role. True when that has just ended."""
        now = self.clock.now()
        if lacking:
            self.lacking_since = now if self.lacking_since is None else self.lacking_since
            return False
        ended = self.lacking_since is not None
        if ended:
            self.lacking_since, self._available_since = None, now
        return ended

    @recording
    def note_lack(self) -> None:
        """Call periodically, also while no request waits."""
        if self.starts is not None:
            self.starts.note_lack()

    @estimating(lambda _: False)
    def has_lacked_since(self, at: float) -> bool:
        """Whether there was no worker, or none of a role, at `at` or later: a request that came then has waited for a
        start, however short.
        """
        return self.lacking_since is not None or self._available_since >= at

    @estimating(lambda _: False)
    def awaits_start(self) -> bool:
        """Whether the workers that are lacking now start."""
        if self.starts is None or self.lacking_since is None:
            return False
        return self.starts.expected(within_s=self.policy.worker_s)

    def until_capacity(self, arrived: float) -> float:
        """When a request that lacks capacity gives up."""
        return max(arrived, self._available_since) + self.policy.room_s

    def until_worker(self, arrived: float) -> float:
        """When a request that no worker can serve gives up."""
        if self.lacking_since is None:
            # The router may not choose yet what is offered.
            return max(arrived, self._available_since) + self.policy.worker_s
        since = max(arrived, self.lacking_since)
        until = since + self.policy.worker_s
        if self.starts is None:
            return until
        return max(until, min(self.starts.seen_at + self.policy.worker_s, since + self.policy.start_s))

    @recording
    def note_choice(self, decision: RouteDecision) -> None:
        """A request goes there."""
        if self.starts is not None:
            self.starts.note_served(
                (decision.decode,) if decision.prefill is None else (decision.decode, decision.prefill)
            )

    @estimating(lambda _: 0.0)
    def until_start_s(self) -> float:
        """Predicted time until lacking workers that start serve; 0 while none is known to start, or to be lacking."""
        if self.starts is None or self.lacking_since is None:
            return 0.0
        starting = self.clock.now() - self.starts.seen_at < self.policy.worker_s
        return self.starts.remaining_s() if starting and self.starts.lacking() else 0.0

    @estimating(lambda _: MIN_S)
    def retry_s(self) -> float:
        """When there may be a worker for what is refused now."""
        return MIN_S if self.starts is None else self.starts.remaining_s()
