"""Virtual token counters of all gateways of a deployment: one atomic function in Redis (scripts/fair.lua)."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

import msgspec

from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.keys import Keys
from tandem_services.router.library import FunctionLibrary
from tandem_services.router.registry import decode_reply


class _SyncReply(msgspec.Struct, frozen=True, kw_only=True):
    floor: str
    values: list[tuple[str, str]]
    waiting: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Charge:
    """What one gateway did for one tenant since its last report."""

    tenant: str
    cost: float
    """Virtual tokens over the tenant's weight."""
    waits: bool
    """Something of it waits there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Counters of all gateways together."""

    values: dict[str, float]
    floor: float
    waiting: float
    """The least of those that wait anywhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FairBoard:
    """Raises `RedisUnavailableError`."""

    library: FunctionLibrary
    keys: Keys

    async def sync(self, charges: Iterable[Charge]) -> Standing:
        """Add `charges`; returns where their tenants stand."""
        args: list[str] = []
        for charge in charges:
            args += (charge.tenant, f"{charge.cost:.6f}", "1" if charge.waits else "0")
        reply = decode_reply(await self.library.call("fair_sync", self.keys.fairness, *args), _SyncReply)
        return Standing(
            values={tenant: _number(value) for tenant, value in reply.values},
            floor=_number(reply.floor),
            waiting=_number(reply.waiting),
        )


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise RedisUnavailableError(f"fair_sync answered with the counter {text[:40]!r}")
    return value
