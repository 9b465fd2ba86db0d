"""What gateways of a deployment tell each other about fairness: virtual token counters, who waits where, and places
that one leaves to another. One atomic function in Redis (scripts/fair.lua).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import msgspec

from tandem_services.router.keys import Keys
from tandem_services.router.library import FunctionLibrary


class _SyncReply(msgspec.Struct, frozen=True, kw_only=True):
    floor: str
    values: list[tuple[str, str]]
    wishes: list[tuple[str, str]]
    places: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Charge:
    """What one gateway did for one tenant since its last report."""

    tenant: str
    cost: float
    """Virtual tokens over the tenant's weight."""
    waits: bool
    """Something of it waits there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """Whom the next place of a gateway is for."""

    priority: int
    tenant: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What one gateway tells the others."""

    gateway: str
    charges: Sequence[Charge]
    wish: Wish | None = None
    left: int = 0
    """Places that it leaves to others."""
    wanted: int = 0
    """Places that it would take where others leave some."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WishElsewhere:
    """Of another gateway."""

    priority: int
    value: float
    """Counter of the tenant that its next place is for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Counters of all gateways together, and wishes, at one moment."""

    values: dict[str, float]
    """Of the tenants in the report."""
    floor: float
    wishes: tuple[WishElsewhere, ...] = ()
    places: int = 0
    """That others have left, and that are the reporter's from now on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FairBoard:
    """Raises `RedisUnavailableError`; after the report has been added up, `UnreadableReplyError`, which is logged."""

    library: FunctionLibrary
    keys: Keys

    async def sync(self, report: Report) -> Standing:
        """Add its charges; returns where their tenants stand."""
        wish = "" if report.wish is None else f"{report.wish.priority} {report.wish.tenant}"
        args: list[str | int] = [report.gateway, wish, report.left, report.wanted]
        for charge in report.charges:
            args += (charge.tenant, f"{charge.cost:.6f}", "1" if charge.waits else "0")
        reply = await self.library.ask("fair_sync", self.keys.fairness, *args, shape=_SyncReply)
        try:
            return Standing(
                values={tenant: _number(value) for tenant, value in reply.values},
                floor=_number(reply.floor),
                wishes=tuple(_wish_elsewhere(priority, value) for priority, value in reply.wishes),
                places=reply.places,
            )
        except ValueError as error:
            raise self.library.unreadable("fair_sync", error) from error


def _wish_elsewhere(priority: str, value: str) -> WishElsewhere:
    return WishElsewhere(priority=int(priority), value=_number(value))


def _number(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text[:40]!r} is no counter")
    return value
