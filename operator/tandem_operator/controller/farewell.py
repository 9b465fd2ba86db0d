"""What a deleted service has left: pools whose gateway pods do not end in time are taken away with what they hold."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tandem_operator.controller.carry_out import Executor
from tandem_operator.controller.events import EventPoster, Told
from tandem_operator.controller.kinds import WORKER_POOL, ServiceKey
from tandem_operator.controller.objects import Seen
from tandem_operator.controller.ownership import pods_that_hold
from tandem_operator.planning.deletion import drain_bound_s

DEFAULT_GRACE_S = 30.0
"""Of a pod that names none: Kubernetes' own default."""


@dataclass(frozen=True, slots=True)
class Parting:
    """What became of one step."""

    wrote: bool = False
    again_s: float | None = None


class Farewells:
    """Services that are gone. `clock` is monotonic: a clock that jumps neither hurries nor holds anything."""

    def __init__(self, executor: Executor, events: EventPoster, clock: Callable[[], float]) -> None:
        self._executor = executor
        self._events = events
        self._clock = clock
        self._since: dict[ServiceKey, float] = {}

    async def step(self, key: ServiceKey, left: Iterable[Seen]) -> Parting:
        """`left`: objects with the service's label that no service of that name owns any more. Raises `ApiError`."""
        left = list(left)
        draining = {pool.uid: pods for pool in left if _is_pool(pool) and (pods := _ending(pool, left))}
        if not draining:
            self.forget(key)
            return Parting()
        elapsed = self._clock() - self._since.setdefault(key, self._clock())
        bound = drain_bound_s(max(_grace_s(pod) for pods in draining.values() for pod in pods))
        if elapsed < bound:
            return Parting(again_s=bound - elapsed)
        for pool in (one for one in left if one.uid in draining):
            note = f"gateways did not finish within {bound:.0f} s; remaining requests are aborted"
            await self._events.post(pool, Told("Warning", "DrainTimedOut", note))
            await self._executor.delete(pool)
        self.forget(key)
        return Parting(wrote=True)

    def forget(self, key: ServiceKey) -> None:
        self._since.pop(key, None)


def _is_pool(seen: Seen) -> bool:
    return seen.ref.kind == WORKER_POOL.name and not seen.deleting


def _ending(pool: Seen, left: list[Seen]) -> list[Seen]:
    """The gateway pods that hold it, if all of them are being deleted. Others are served on: the service was deleted
    without what it owns (`kubectl delete --cascade=orphan`).
    """
    pods = pods_that_hold(pool, left)
    return pods if all(pod.deleting for pod in pods) else []


def _grace_s(pod: Seen) -> float:
    return float(pod.body["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_S))
