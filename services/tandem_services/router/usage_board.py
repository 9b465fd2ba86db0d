"""What tenants use, for all gateways of a deployment: one atomic function in Redis (scripts/usage.lua).

A running request holds a lease that its gateway renews. Those of a gateway that died end by themselves.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from tandem_services.router.keys import LEASE_OF_REQUEST_MS, Keys
from tandem_services.router.library import FunctionLibrary
from tandem_services.router.usage_windows import Ask, Refused, Usage, UsageLimits


class _TakeReply(msgspec.Struct, frozen=True, kw_only=True):
    refused: Refused
    second: int
    retry_ms: float
    requests: int
    requests_reset_ms: float
    tokens: int
    tokens_reset_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageBoard:
    """All methods raise `RedisUnavailableError`."""

    library: FunctionLibrary
    keys: Keys

    async def take(self, tenant: str, limits: UsageLimits, ask: Ask) -> Usage:
        """Grant `ask`, or say which limit is in its way."""
        reply = await self.library.ask(
            "usage_take",
            self.keys.usage_of(tenant),
            limits.requests,
            limits.tokens,
            limits.concurrency,
            ask.requests,
            ask.tokens,
            ask.lease,
            LEASE_OF_REQUEST_MS,
            shape=_TakeReply,
        )
        return Usage(
            refused=reply.refused,
            second=reply.second,
            retry_s=None if reply.retry_ms < 0 else reply.retry_ms / 1000,
            requests=reply.requests,
            requests_reset_s=reply.requests_reset_ms / 1000,
            tokens=reply.tokens,
            tokens_reset_s=reply.tokens_reset_ms / 1000,
        )

    async def settle(self, tenant: str, *, second: int, tokens: int, lease: str) -> None:
        """A request has ended: see `UsageWindows.settle`."""
        await self.library.call("usage_settle", self.keys.usage_of(tenant), second, tokens, lease)

    async def renew(self, tenant: str, leases: Iterable[str]) -> None:
        """Requests that still run. One that has ended meanwhile stays ended."""
        await self.library.call("usage_renew", self.keys.usage_of(tenant), LEASE_OF_REQUEST_MS, *leases)
