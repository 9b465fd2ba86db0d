"""What a tenant that is behind may do in a gateway's queue.

A tenant is behind if each other one that is present will have had more service, with the next request of each: what it
gets now takes nothing from the others' shares.

    at once    its request queries the router when it comes. Others have a turn of the queue, which begins when the
               query of the one before it has ended: in a queue of a thousand choices there is always one
    more wait  its prompt may find `BEHIND_WAIT` times as many others at a worker: workers compute prompts of tenants
               in turns
    early      up to `MAX_EARLY` of its choices go to a worker without a free place, and get the next ones

One request of a tenant goes at once at a time. The next ones come after those of it that wait.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from tandem_engine.base.clock import Clock
from tandem_services.gateway.queueing.fair_queue import FairQueue, W

BEHIND_WAIT = 2.0
"""Above 1, so that a tenant that keeps a worker at its limit leaves room for others."""

MAX_EARLY = 4
"""Choices of one queue that were sent to workers before a place there was free."""

RECENT_S = 10.0
"""For so long a tenant counts as present after a request."""


@dataclass(kw_only=True, slots=True)
class Precedence:
    """One per queue; belongs to its event loop."""

    clock: Clock
    _seen: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """When a request of it last came, the last one last."""
    _at_once: dict[str, int] = field(default_factory=dict)
    """Requests that query the router without a turn of the queue, by tenant."""
    _early: int = 0
    """Choices that were sent early, less the places freed since."""

    def see(self, tenant: str) -> None:
        """A request of it has come."""
        self._seen[tenant] = self.clock.now()
        self._seen.move_to_end(tenant)

    def is_behind(self, waiting: W, queue: FairQueue[W]) -> bool:
        """Whether its tenant will have had less than each other that is present, with the next request of each."""
        if len(self._seen) == 1 and waiting.tenant in self._seen:
            return False
        oldest = self.clock.now() - RECENT_S
        while self._seen and next(iter(self._seen.values())) < oldest:
            self._seen.popitem(last=False)
        others = [queue.after_next(other) for other in self._seen if other != waiting.tenant]
        return bool(others) and queue.counters.value(waiting.tenant) + waiting.cost < min(others)

    def starts_at_once(self, arriving: W, queue: FairQueue[W]) -> bool:
        """Whether this new request queries the router without a turn of the queue."""
        if not queue:
            return True
        if not arriving.is_behind or arriving.tenant in self._at_once or queue.holds(arriving.tenant):
            return False
        head = queue.next(self.clock.now())
        return head is None or head.priority <= arriving.priority

    def begin_at_once(self, tenant: str) -> None:
        """A request of it queries the router without a turn."""
        self._at_once[tenant] = self._at_once.get(tenant, 0) + 1

    def end_at_once(self, tenant: str) -> None:
        """It has its answer. Call once for each that began."""
        self._at_once[tenant] -= 1
        if not self._at_once[tenant]:
            del self._at_once[tenant]

    def longest_wait_s(self, waiting: W, usual_s: float) -> float:
        """For other prompts at a worker that counts as having capacity."""
        return usual_s * (BEHIND_WAIT if waiting.is_behind else 1.0)

    def goes_early(self, waiting: W) -> bool:
        """Whether it takes one of the few places of choices that are sent early."""
        early = waiting.is_behind and self._early < MAX_EARLY
        self._early += early
        return early

    def takes_freed_place(self) -> bool:
        """Whether a place that has become free is for a choice that was sent early."""
        if not self._early:
            return False
        self._early -= 1
        return True
