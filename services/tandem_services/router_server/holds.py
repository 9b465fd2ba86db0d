"""Choices that front ends have been given, from the choice to its release, and what is remembered of them.

open       reserved; counts as this router's own load
released   by the front end, when its request has ended; what a gateway has redeemed is the gateway's to give back
expired    nobody released it in `ttl_s`, or newer ones needed its place
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from tandem_engine.clock import Clock
from tandem_services.common.tasks import for_ever
from tandem_services.router.choice import Choice
from tandem_services.router_server.schemas import ChoiceRecord

logger = logging.getLogger(__name__)

EXPIRY_EVERY_S = 1.0


class Releaser(Protocol):
    """See `Router`."""

    async def release(self, choice: Choice) -> None: ...

    async def release_unredeemed(self, ticket_id: str, choice: Choice) -> None: ...


@dataclass(kw_only=True, slots=True, eq=False)
class Held:
    """One choice that is not released yet."""

    choice: Choice
    record: ChoiceRecord
    since: float

    @property
    def reservation(self) -> str:
        return self.record.choice.reservation


@dataclass(kw_only=True, slots=True)
class Holds:
    """All of one router. Belongs to its event loop."""

    router: Releaser
    clock: Clock
    ttl_s: float
    capacity: int
    remembered: int
    """Records that explain finds, open or not."""
    _open: OrderedDict[str, Held] = field(default_factory=OrderedDict)
    """By reservation, the oldest first."""
    _records: OrderedDict[str, tuple[ChoiceRecord, float]] = field(default_factory=OrderedDict)
    _by_request: dict[str, str] = field(default_factory=dict)
    """A front end's own id → reservation of the newest choice for it."""

    def __len__(self) -> int:
        return len(self._open)

    def hold(self, held: Held) -> list[Held]:
        """Keep a choice. Returns those that are kept no longer, for `give_back`: the oldest, beyond `capacity`."""
        self._open[held.reservation] = held
        self._remember(held)
        return [self._open.popitem(last=False)[1] for _ in range(len(self._open) - self.capacity)]

    async def release(self, reservation: str) -> bool:
        """False when it is not held, or not any more."""
        held = self._open.pop(reservation, None)
        if held is not None:
            await self.give_back(held, "released")
        return held is not None

    async def expire(self) -> None:
        """End what is older than `ttl_s`."""
        now = self.clock.now()
        while self._open and now - next(iter(self._open.values())).since >= self.ttl_s:
            await self.give_back(self._open.popitem(last=False)[1], "expired")

    async def run(self) -> None:
        """Expire what is old, for ever."""
        await for_ever(self.expire, every_s=EXPIRY_EVERY_S, logger=logger, complaint="cannot expire reservations")

    async def close(self) -> None:
        """At shutdown: everything is given back."""
        while self._open:
            await self.give_back(self._open.popitem()[1], "expired")

    async def give_back(self, held: Held, state: str) -> None:
        """End one that is not held any more."""
        held.record.state = state
        if not held.record.choice.for_gateway:
            await self.router.release(held.choice)
        else:
            await self.router.release_unredeemed(held.reservation, held.choice)

    def find(self, name: str) -> ChoiceRecord | None:
        """By reservation, or by the front end's own id: then the newest."""
        found = self._records.get(name) or self._records.get(self._by_request.get(name, ""))
        return None if found is None else self._aged(*found)

    def newest(self, count: int) -> list[ChoiceRecord]:
        names = [*self._records][: -count - 1 : -1]
        return [self._aged(*self._records[name]) for name in names]

    def _aged(self, record: ChoiceRecord, since: float) -> ChoiceRecord:
        record.age_s = round(self.clock.now() - since, 3)
        return record

    def _remember(self, held: Held) -> None:
        self._records[held.reservation] = (held.record, held.since)
        if held.record.request_id:
            self._by_request[held.record.request_id] = held.reservation
        while len(self._records) > self.remembered:
            name, (record, _) = self._records.popitem(last=False)
            if self._by_request.get(record.request_id) == name:
                del self._by_request[record.request_id]
