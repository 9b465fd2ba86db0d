"""Limits of tenants: exact over all gateways while Redis answers, of this gateway alone while it does not.

What Redis grants is noted here too, so that the local decision starts from what this gateway knows. Without Redis a
tenant gets at most its limit from each gateway, and no request fails or waits because Redis is away.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tandem_engine.clock import Clock
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.common.tasks import BackgroundTasks, for_ever
from tandem_services.gateway.access.access_metrics import AccessMetrics
from tandem_services.gateway.access.tenants import Tenant
from tandem_services.router.keys import LEASE_OF_REQUEST_MS
from tandem_services.router.usage_windows import Ask, Refused, Usage, UsageLimits, UsageWindows

logger = logging.getLogger(__name__)

RENEW_S = LEASE_OF_REQUEST_MS / 1000 / 3
"""One renewal may be lost and one late."""


class Board(Protocol):
    """Usage that all gateways share. Methods raise `RedisUnavailableError`; see `UsageBoard`."""

    async def take(self, tenant: str, limits: UsageLimits, ask: Ask) -> Usage: ...

    async def settle(self, tenant: str, *, second: int, tokens: int, lease: str) -> None: ...

    async def renew(self, tenant: str, leases: Iterable[str]) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """What came of an ask."""

    usage: Usage
    local_second: int
    """Of this gateway's clock; `usage.second` is of whoever decided."""
    shared: bool
    """Redis decided."""


@dataclass(kw_only=True, slots=True)
class TenantLimits:
    """One per gateway; belongs to its event loop."""

    clock: Clock
    metrics: AccessMetrics
    board: Board | None = None
    _windows: dict[str, UsageWindows] = field(default_factory=dict)
    _background: BackgroundTasks = field(default_factory=BackgroundTasks)

    async def take(self, tenant: Tenant, ask: Ask) -> Taken:
        """Ask for one request. It is not granted where `usage.refused` says why."""
        windows = self._windows.setdefault(tenant.name, UsageWindows())
        if self.board is not None:
            try:
                usage = await self.board.take(tenant.name, tenant.limits, ask)
            except RedisUnavailableError:
                self.metrics.local_decisions.inc()
            else:
                if usage.refused is Refused.NOTHING:
                    windows.forget(self.clock.now())
                    windows.note(ask, self.clock.now())
                return Taken(usage=usage, local_second=int(self.clock.now()), shared=True)
        usage = windows.take(tenant.limits, ask, self.clock.now())
        return Taken(usage=usage, local_second=usage.second, shared=False)

    def settle(self, tenant: Tenant, taken: Taken, *, tokens: int, lease: str) -> None:
        """A request has ended that used `tokens` more than it had taken. Redis learns it a moment later."""
        windows = self._windows.setdefault(tenant.name, UsageWindows())
        windows.settle(taken.local_second, tokens, self.clock.now())
        windows.end(lease)
        if taken.shared and self.board is not None and (tokens or lease):
            # The client's last chunk must not wait for Redis.
            self._background.start(self._settle_shared(tenant, taken.usage.second, tokens, lease))

    async def run(self) -> None:
        """Renew leases of running requests, and forget who is idle, for ever."""
        # Leases that are not renewed would let tenants run more than they may.
        complaint = "renewing leases of running requests failed"
        await for_ever(self.renew, every_s=RENEW_S, logger=logger, complaint=complaint)

    async def renew(self) -> None:
        """Redis away: next time."""
        now = self.clock.now()
        for name, windows in [*self._windows.items()]:
            windows.forget(now)
            if windows.idle:
                del self._windows[name]
            elif windows.running and self.board is not None:
                try:
                    await self.board.renew(name, windows.running)
                except RedisUnavailableError:
                    return

    async def close(self) -> None:
        """Wait for what Redis has still to learn."""
        await self._background.settle()

    async def _settle_shared(self, tenant: Tenant, second: int, tokens: int, lease: str) -> None:
        assert self.board is not None, "usage settled without Redis"
        try:
            await self.board.settle(tenant.name, second=second, tokens=tokens, lease=lease)
        except RedisUnavailableError:
            logger.debug("cannot update usage of %s, it expires in Redis in a minute", tenant.name)
