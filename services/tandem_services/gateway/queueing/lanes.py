"""Which requests pass one that lacks capacity: those that take nothing of what it waits for.

Only workers that have an adapter, or can load it, serve its requests. While all of them are full, the first such
request would hold back every request behind it, also those that other workers have capacity for.

    blocked    the request that is tried lacks capacity. Requests of its adapter stay behind it, and so do those that
               have no other workers than the ones it waits for
    passing    others are tried in the order of the queue, without these workers. They take no place and no prompt
               capacity that the blocked request could have, so it waits no longer than without them

A request whose adapter no worker has is passed by all others. One of the model alone can have any worker, so nothing
passes it. A request that waits for a place to generate
blocks the workers that generate; one that waits for other prompts blocks those that compute prompts.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tandem_engine.base.checked_dataclass import checked_dataclass
from tandem_engine.config import Role
from tandem_services.router.decision import RouteDecision, WorkerView
from tandem_services.router.scoring import has_to_wait

GENERATING = frozenset({Role.DECODE, Role.BOTH})
PREFILLING = frozenset({Role.PREFILL, Role.BOTH})


@checked_dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """What a request needs to pass others."""

    adapter: bytes
    """Digest; b"" for the model alone."""
    registered: bool = False
    """Its requests name the folder."""
    ask_apart: Callable[[frozenset[str]], Awaitable[RouteDecision]]
    """Queries the router without these workers, by incarnation. Raises `NoWorkersError`."""

    def serves(self, worker: WorkerView) -> bool:
        """Whether `worker` may serve its requests, after a load where it has to."""
        return not self.adapter or worker.can_serve(self.adapter, registered=self.registered)


@dataclass(kw_only=True, slots=True)
class BlockedLanes:
    """Of one round of a queue."""

    workers: tuple[WorkerView, ...] = ()
    """All of the fleet."""
    _avoided: set[str] = field(default_factory=set)
    _blocked: dict[bytes, bool] = field(default_factory=dict)
    """Whether requests of an adapter wait, of those that were looked at."""
    _served: dict[bytes, bool] = field(default_factory=dict)
    """Whether an adapter has a worker."""
    _any: bool = False

    def __bool__(self) -> bool:
        """Whether a request lacks capacity: all others have to pass it."""
        return self._any

    @property
    def avoided(self) -> frozenset[str]:
        """Incarnations that passing requests do not get."""
        return frozenset(self._avoided)

    def block(self, lane: Lane | None, decision: RouteDecision | None) -> None:
        """A request of `lane` lacks capacity: `decision` is what the router would have given it; None for nothing."""
        self._any = True
        # Another worker less may leave further adapters without one.
        self._blocked = {adapter: True for adapter, blocked in self._blocked.items() if blocked}
        if lane is not None:
            self._blocked[lane.adapter] = True
        if decision is not None:
            generates = has_to_wait(decision.terms) or decision.prefill is None
            roles = GENERATING if generates else PREFILLING
            own = (worker for worker in self.workers if lane is None or lane.serves(worker))
            self._avoided.update(worker.incarnation for worker in own if worker.role in roles)

    def hold(self, lane: Lane | None) -> bool:
        """Whether a request of `lane` waits behind one that lacks capacity, or has no worker at all."""
        if lane is None:
            return self._any
        blocked = self._blocked.get(lane.adapter)
        if blocked is None:
            leaves = not self._any or (self._leave(lane, GENERATING) and self._leave(lane, PREFILLING))
            blocked = self._blocked[lane.adapter] = not leaves or not self.serve(lane)
        return blocked

    def serve(self, lane: Lane) -> bool:
        """Whether there is a worker for it."""
        served = self._served.get(lane.adapter)
        if served is None:
            served = self._served[lane.adapter] = any(map(lane.serves, self.workers))
        return served

    def _leave(self, lane: Lane, roles: frozenset[Role]) -> bool:
        """Whether `lane` keeps a worker with one of `roles`, if it has any."""
        own = [worker.incarnation for worker in self.workers if worker.role in roles and lane.serves(worker)]
        return not own or not self._avoided.issuperset(own)
