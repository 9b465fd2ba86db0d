"""Tenants and their limits. Each entry of the key file is one tenant (docs/limits.md).

`TenantLimits` enforces the limits over all gateways while Redis answers, and for this gateway alone while it does not.
It also records what Redis grants, so that the local decision starts from the usage this gateway has seen. Without Redis
a tenant gets at most its limit from each gateway; no request fails or waits because Redis is unavailable.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Protocol

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from tandem_engine.base.clock import Clock
from tandem_services.common.errors import ApiError
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.common.tasks import BackgroundTasks, run_periodically
from tandem_services.gateway.process_place import ProcessPlace
from tandem_services.router.keys import LEASE_OF_REQUEST_MS
from tandem_services.router.usage_counters import Ask, Refused, Usage, UsageLimits, UsageWindows

MAX_COUNT = 10**12
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
Weight = Annotated[float, msgspec.Meta(ge=0.001, le=1000)]
Priority = Annotated[int, msgspec.Meta(ge=-1000, le=1000)]


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that is known about the holders of one entry's keys."""

    name: Name
    """In logs, metrics and Redis keys."""
    sha256: tuple[Digest, ...]
    """Digests of its keys: one, or two while they are exchanged."""
    models: tuple[str, ...] | None = None
    """What it may use; absent: every model."""
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    """Prompt and output tokens."""
    concurrency: Count | None = None
    """Requests at once."""
    weight: Weight = 1.0
    """Its share of the fleet while there is not enough for all."""
    priority: Priority = 0
    """The most that its requests may ask for; greater goes first."""
    share_cache: bool = False
    """Its prompts may be found in the prefix cache by other tenants that share, and theirs by it."""
    parse_special_tokens: bool = True
    """Special tokens in its text prompts become control tokens; otherwise they are plain text."""
    admin: bool = False
    """It may use admin routes."""

    @property
    def limits(self) -> UsageLimits:
        return UsageLimits(
            requests=self.requests_per_minute or 0,
            tokens=self.tokens_per_minute or 0,
            concurrency=self.concurrency or 0,
        )


SOLE_TENANT = ""
"""Name of the one tenant there is without a key file. No entry can have it."""


class AccessMetrics:
    """All series about access of one gateway, registered in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tenants = Gauge("tandem_gateway_api_key_tenants", "Tenants of the key file in use", registry=registry)
        self._stale = Gauge(
            "tandem_gateway_api_keys_stale",
            "1 while the key file is invalid and the previous keys are used",
            registry=registry,
        )
        self._reloads = Counter(
            "tandem_gateway_api_key_reloads_total", "Key files read, by outcome", ["outcome"], registry=registry
        )
        self._failures = Counter(
            "tandem_gateway_authentication_failures_total",
            "Requests rejected because of their key",
            ["reason"],
            registry=registry,
        )
        self._limited = Counter(
            "tandem_gateway_requests_limited_total",
            "Requests rejected by a limit of their tenant",
            ["tenant", "limit"],
            registry=registry,
        )
        self._tokens = Counter(
            "tandem_gateway_tenant_tokens_total",
            "Prompt and output tokens of finished requests",
            ["tenant"],
            registry=registry,
        )
        self.local_decisions = Counter(
            "tandem_gateway_limits_local_total",
            "Limit decisions of this gateway alone, because Redis was unavailable",
            registry=registry,
        )

    def keys_loaded(self, tenants: int) -> None:
        self._tenants.set(tenants)
        self._stale.set(0)
        self._reloads.labels(outcome="loaded").inc()

    def keys_refused(self) -> None:
        self._stale.set(1)
        self._reloads.labels(outcome="refused").inc()

    def refused(self, reason: str) -> None:
        self._failures.labels(reason=reason).inc()

    def limited(self, tenant: str, limit: str) -> None:
        self._limited.labels(tenant=tenant, limit=limit).inc()

    def used(self, tenant: str, tokens: int) -> None:
        self._tokens.labels(tenant=tenant).inc(tokens)


BUSY_RETRY_S = 1.0
"""A request of the tenant may end at any time."""


def rate_headers(tenant: Tenant, usage: Usage) -> list[tuple[bytes, bytes]]:
    """Of the limits that the tenant has."""
    headers: list[tuple[bytes, bytes]] = []
    if tenant.requests_per_minute is not None:
        headers += _triple("requests", tenant.requests_per_minute, usage.requests, usage.requests_reset_s)
    if tenant.tokens_per_minute is not None:
        headers += _triple("tokens", tenant.tokens_per_minute, usage.tokens, usage.tokens_reset_s)
    return headers


def refusal(tenant: Tenant, usage: Usage, ask: Ask) -> ApiError:
    """429 for the reason in `usage.refused`."""
    match usage.refused:
        case Refused.REQUESTS:
            return _over("requests per min (RPM)", tenant.requests_per_minute or 0, usage.requests, 1, usage.retry_s)
        case Refused.TOKENS:
            return _over("tokens per min (TPM)", tenant.tokens_per_minute or 0, usage.tokens, ask.tokens, usage.retry_s)
        case Refused.CONCURRENCY | Refused.NOTHING:
            return _limited(f"You may have {tenant.concurrency} requests at once, and have them.", BUSY_RETRY_S)


def _over(what: str, limit: int, used: int, asked: int, retry_s: float | None) -> ApiError:
    if retry_s is None:
        return _limited(
            f"Request too large on {what}: Limit {limit}, Requested {asked}. The prompt or max_tokens must be reduced.",
            None,
        )
    return _limited(
        f"Rate limit reached on {what}: Limit {limit}, Used {used}, Requested {asked}. "
        f"Please try again in {duration(retry_s)}.",
        retry_s,
    )


def _limited(message: str, retry_after: float | None) -> ApiError:
    return ApiError(429, message, kind="RateLimitError", reason="rate_limit_exceeded", retry_after=retry_after)


def _triple(what: str, limit: int, used: int, reset_s: float) -> Iterator[tuple[bytes, bytes]]:
    for name, value in (("limit", limit), ("remaining", max(0, limit - used)), ("reset", duration(reset_s))):
        yield f"x-ratelimit-{name}-{what}".encode("ascii"), str(value).encode("ascii")


def duration(seconds: float) -> str:
    """As OpenAI writes it: 250ms, 17s, 1m0s. Rounded up, so that a client that waits for it has waited enough."""
    if seconds < 1:
        return f"{math.ceil(max(seconds, 0.0) * 1000)}ms"
    whole = math.ceil(seconds)
    return f"{whole}s" if whole < 60 else f"{whole // 60}m{whole % 60}s"


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
    """Of this gateway's clock; `usage.second` is of the clock of the decision, which may be Redis's."""
    shared: bool
    """Redis decided."""


def _lacking(limits: UsageLimits, own: UsageLimits) -> Refused:
    """The first limit of which a process has no share."""
    if limits.requests and not own.requests:
        return Refused.REQUESTS
    if limits.tokens and not own.tokens:
        return Refused.TOKENS
    return Refused.CONCURRENCY if limits.concurrency and not own.concurrency else Refused.NOTHING


@dataclass(kw_only=True, slots=True)
class TenantLimits:
    """One per gateway; belongs to its event loop."""

    clock: Clock
    metrics: AccessMetrics
    board: Board | None = None
    place: ProcessPlace | None = None
    """Among other processes of this gateway: without Redis each grants its share of a limit."""
    _windows: dict[str, UsageWindows] = field(default_factory=dict)
    _background: BackgroundTasks = field(default_factory=BackgroundTasks)

    async def take(self, tenant: Tenant, ask: Ask) -> Taken:
        """Request usage for one request. `usage.refused` has the reason when it is not granted."""
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
        usage = self._take_alone(tenant.limits, windows, ask)
        return Taken(usage=usage, local_second=usage.second, shared=False)

    def _take_alone(self, limits: UsageLimits, windows: UsageWindows, ask: Ask) -> Usage:
        """Without Redis. Processes of one gateway grant together what a single one would."""
        now = self.clock.now()
        if self.place is None:
            return windows.take(limits, ask, now)
        share = self.place.share_of
        own = UsageLimits(
            requests=share(limits.requests), tokens=share(limits.tokens), concurrency=share(limits.concurrency)
        )
        lacking = _lacking(limits, own)
        if lacking is Refused.NOTHING:
            return windows.take(own, ask, now)
        # The limit is smaller than the number of processes, and another one has it.
        return replace(windows.take(UsageLimits(), Ask(), now), refused=lacking, retry_s=BUSY_RETRY_S)

    def settle(self, tenant: Tenant, taken: Taken, *, tokens: int, lease: str) -> None:
        """A request has ended that used `tokens` more than it had taken. Redis learns it a moment later."""
        windows = self._windows.setdefault(tenant.name, UsageWindows())
        windows.settle(taken.local_second, tokens, self.clock.now())
        windows.end(lease)
        if taken.shared and self.board is not None and (tokens or lease):
            # The client's last chunk must not wait for Redis.
            self._background.start(self._settle_shared(tenant, taken.usage.second, tokens, lease))

    async def run(self) -> None:
        """Renew leases of running requests, and forget idle tenants, until canceled."""
        # Leases that are not renewed would let tenants run more than they may.
        failure = "renewing leases of running requests failed"
        await run_periodically(self.renew, every_s=RENEW_S, logger=logger, failure=failure)

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
