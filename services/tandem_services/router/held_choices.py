"""Choices that are being carried out: counted as this gateway's own load, and given back when they end.

What a choice has reserved in Redis counts there for `RESERVATION_MS`; only until then is there anything to give back.
"""

import logging
from dataclasses import dataclass, field
from itertools import count

from tandem_engine.clock import Clock
from tandem_engine.messages.requests import about_attempt
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.choice import Choice, Reservation
from tandem_services.router.cost import ASSUMED_PREFILL_RATE
from tandem_services.router.index import BlockIndex
from tandem_services.router.keys import RESERVATION_MS
from tandem_services.router.local import OwnLoad
from tandem_services.router.membership import Membership

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class HeldChoices:
    """One per router."""

    clock: Clock
    own: OwnLoad
    membership: Membership
    index: BlockIndex
    _serials: "count[int]" = field(default_factory=lambda: count(1))
    _chosen_at: dict[int, float] = field(default_factory=dict)
    """Choices not released yet, by serial."""

    def next_serial(self) -> int:
        """Of a choice that is about to be held."""
        return next(self._serials)

    def add(self, choice: Choice) -> None:
        """It will be released."""
        rates = {}
        for claim in choice.reservation.claims:
            record = self.membership.find(claim.incarnation)
            rates[claim.incarnation] = record.load.prefill_rate if record else ASSUMED_PREFILL_RATE
        self.own.add(choice.reservation.claims, rates)
        self._chosen_at[choice.reservation.serial] = self.clock.now()

    async def release(self, choice: Choice) -> None:
        """Releasing twice counts once."""
        reserved = self.reserves(choice)
        if self.drop(choice) and reserved:
            await self.give_back(choice.request_id, choice.reservation)

    def drop(self, choice: Choice) -> bool:
        """As `release`, of what somebody else gives back in Redis, or nobody. False when it was not held any more."""
        if self._chosen_at.pop(choice.reservation.serial, None) is None:
            return False
        self.own.remove(choice.reservation.claims)
        return True

    def reserves(self, choice: Choice) -> bool:
        """Whether what it reserved in Redis may still count."""
        chosen_at = self._chosen_at.get(choice.reservation.serial, float("-inf"))
        return choice.reservation.bucket is not None and self.clock.now() - chosen_at <= RESERVATION_MS / 1000

    async def give_back(self, request_id: str, reservation: Reservation) -> None:
        """In Redis alone. Without Redis it expires by itself."""
        try:
            await self.index.release(reservation)
        except RedisUnavailableError:
            fields = about_attempt(request_id)
            logger.debug("cannot release the reservation of %s, it expires", request_id, extra={"fields": fields})
