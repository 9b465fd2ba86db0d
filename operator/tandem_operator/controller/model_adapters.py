"""Writes the statuses of ModelAdapters, with events for what has changed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from tandem_operator.api.model_adapter import ModelAdapterStatus
from tandem_operator.controller.applier import Applier
from tandem_operator.controller.cluster import ApiError
from tandem_operator.controller.events import EventRecorder, events_for_conditions
from tandem_operator.controller.observations import model_adapters_of
from tandem_operator.controller.store import Seen, ask_of
from tandem_operator.planning.adapter_status import without_service


@dataclass(frozen=True, slots=True)
class ModelAdapterStatuses:
    """Of the ModelAdapters that name one service at a time."""

    applier: Applier
    events: EventRecorder

    async def write(self, adapters: Iterable[Seen], statuses: Mapping[str, ModelAdapterStatus]) -> bool:
        """By names of objects. Whether any was written. Raises `ApiError`."""
        wrote = False
        for seen in adapters:
            before, after = ask_of(seen).before, statuses.get(seen.ref.name)
            if after is None or after == before:
                continue
            wrote = True
            try:
                await self.applier.apply_status(seen, msgspec.to_builtins(after))
            except ApiError as error:
                # Deleted in the meantime, or another object has its name by now: its event comes.
                if not (error.absent or error.conflict):
                    raise
                continue
            for event in events_for_conditions(before.conditions, after.conditions):
                await self.events.post(seen, event)
        return wrote

    async def write_without_service(self, known: Iterable[Seen], service: str, now: str) -> bool:
        """Of those whose service is not there. `now`: RFC 3339. As `write`."""
        adapters = model_adapters_of(known)
        return await self.write(adapters, without_service(map(ask_of, adapters), service, now))
