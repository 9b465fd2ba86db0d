"""Figures for whoever scales instead of us: services with `autoscaling.mode: external` are looked at each period.

Every replica does so, leading or not, for it writes nothing: an HPA's adapter and KEDA ask whichever they reach. The
leader's lookout goes by what was seen here, so that no pod is asked twice.
"""

import asyncio
import logging
from dataclasses import dataclass, field

import httpx

from tandem_operator.builders.served import Served, served
from tandem_operator.controller.facts import Parts
from tandem_operator.controller.kinds import ServiceKey
from tandem_operator.controller.objects import Seen
from tandem_operator.controller.resources import spec_of
from tandem_operator.controller.store import Store
from tandem_operator.planning.scaling_config import scaling_config
from tandem_operator.settings import OperatorSettings
from tandem_operator.telemetry.external import ScalingFigures
from tandem_operator.telemetry.looks import Seen as PodsSeen
from tandem_operator.telemetry.reading import LoadReader

logger = logging.getLogger(__name__)

PERIOD_S = 5.0
AT_ONCE = 32
"""Services; most of a look is waiting for pods."""


@dataclass(slots=True)
class ExternalLooks:
    """`run` it."""

    store: Store
    settings: OperatorSettings
    client: httpx.AsyncClient
    figures: ScalingFigures
    _readers: dict[ServiceKey, LoadReader] = field(default_factory=dict)
    _seen: dict[ServiceKey, PodsSeen] = field(default_factory=dict)
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(PERIOD_S)

    def seen(self, key: ServiceKey) -> PodsSeen | None:
        """What came of the last look at a service; None before the first."""
        return self._seen.get(key)

    async def look(self) -> None:
        """At all that others scale; what is no longer among them is forgotten."""
        wanted = {
            service.key: (service, found) for service in self.store.services() if (found := self._external(service))
        }
        for key in self._readers.keys() - wanted.keys():
            del self._readers[key]
            self._seen.pop(key, None)
            self.figures.forget((key.namespace, key.name))
        await asyncio.gather(*(self._look_at(service, found) for service, found in wanted.values()))

    def _external(self, service: Seen) -> Served | None:
        try:
            spec = spec_of(service)
        except ValueError:
            # Its status says so.
            return None
        if service.deleting or spec.autoscaling.mode != "external":
            return None
        return served(service.ref.name, service.namespace, spec, self.settings)

    async def _look_at(self, service: Seen, wanted: Served) -> None:
        """Nothing that goes wrong with one service reaches the others."""
        key = service.key
        reader = self._readers.setdefault(key, LoadReader(client=self.client))
        pods = Parts.of(service.uid, self.store.parts(key)).pods_seen()
        try:
            async with self._room:
                seen = await reader.read(pods)
            self._seen[key] = seen
            self.figures.put((key.namespace, key.name), seen, scaling_config(wanted))
        except Exception:
            logger.exception("cannot read pods of %s", key)
            self._seen.pop(key, None)
            self.figures.forget((key.namespace, key.name))
