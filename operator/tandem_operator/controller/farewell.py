"""Carries out `planning.deletion`: gateways drain, then the finalizer goes."""

from collections.abc import Callable
from dataclasses import dataclass

from tandem_operator.builders.naming import gateway_name
from tandem_operator.controller.carry_out import Executor
from tandem_operator.controller.cluster import ApiError
from tandem_operator.controller.events import EventPoster, Told
from tandem_operator.controller.facts import Parts
from tandem_operator.controller.kinds import DEPLOYMENT, ServiceKey
from tandem_operator.controller.objects import Seen
from tandem_operator.controller.resources import generation_of, spec_of, status_of
from tandem_operator.planning.deletion import FINALIZER, drain_bound_s, gateway_selector, leaving, next_farewell
from tandem_operator.planning.observed import Observed

DEFAULT_DRAIN_SECONDS = 60
"""Of a service whose spec cannot be read."""


@dataclass(frozen=True, slots=True)
class Parting:
    """What became of one step."""

    wrote: bool
    again_s: float | None


class Farewells:
    """Services that are going. `clock` is monotonic: a clock that jumps neither hurries nor holds anybody."""

    def __init__(self, executor: Executor, events: EventPoster, clock: Callable[[], float]) -> None:
        self._executor = executor
        self._events = events
        self._clock = clock
        self._since: dict[ServiceKey, float] = {}

    async def step(self, service: Seen, parts: Parts, observed: Observed) -> Parting:
        """Raises `ApiError` when the API server does not answer or refuses."""
        finalizers = service.body["metadata"].get("finalizers", [])
        if FINALIZER not in finalizers:
            return Parting(wrote=False, again_s=None)
        elapsed = self._clock() - self._since.setdefault(service.key, self._clock())
        pods = len(parts.pods_with(gateway_selector(service.ref.name)))
        bound = drain_bound_s(_drain_seconds(service))
        farewell = next_farewell(service.ref.name, observed, pods, elapsed, bound)
        if farewell.late:
            note = f"gateways did not finish within {bound:.0f} s; what is under way is given up"
            await self._events.post(service, Told("Warning", "DrainTimedOut", note))
        if farewell.finished:
            await self._release(service, [one for one in finalizers if one != FINALIZER])
            return Parting(wrote=True, again_s=None)
        if farewell.stop_gateways:
            await self._executor.stop(parts.owned[DEPLOYMENT.ref(gateway_name(service.ref.name))])
        told = await self._executor.write_status(
            service, leaving(status_of(service), generation_of(service), observed.now)
        )
        return Parting(wrote=farewell.stop_gateways or told, again_s=max(0.0, bound - elapsed))

    def forget(self, key: ServiceKey) -> None:
        self._since.pop(key, None)

    async def _release(self, service: Seen, finalizers: list[str]) -> None:
        try:
            await self._executor.set_finalizers(service, finalizers)
        except ApiError as error:
            # With its namespace or its CRD it may go faster than we let it.
            if not error.absent:
                raise


def _drain_seconds(service: Seen) -> int:
    try:
        return spec_of(service).drain_seconds
    except ValueError:
        return DEFAULT_DRAIN_SECONDS
