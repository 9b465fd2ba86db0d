"""The client of one request and its rights. `authentication` creates a `Caller`, which lives as long as the request."""

from dataclasses import dataclass, field
from hashlib import blake2b

from tandem_services.gateway.access.tenants import SOLE_TENANT, Taken, Tenant, TenantLimits, rate_headers, refusal
from tandem_services.router.usage_counters import Ask, Refused, Usage

UNKNOWN = Tenant(name=SOLE_TENANT, sha256=(), admin=True)
"""The one tenant of a gateway without a key file."""


@dataclass(kw_only=True, slots=True)
class Caller:
    """One request's view of its tenant."""

    tenant: Tenant = UNKNOWN
    cache_secret: bytes = b""
    """Of the deployment, at most 64 bytes: a tenant cannot compute the salt of another one."""
    limits: TenantLimits | None = None
    """None: there are none."""
    request_id: str = ""
    _arrival: Taken | None = field(default=None, init=False)
    """The request itself."""
    _further: list[tuple[str, Taken]] = field(default_factory=list, init=False)
    """Places of its choices but the first, which has the request's."""
    _reserved: Taken | None = field(default=None, init=False)
    """Its tokens."""
    _reserved_tokens: int = field(default=0, init=False)
    _used_tokens: int = field(default=0, init=False)
    _usage: Usage | None = field(default=None, init=False)

    @property
    def known(self) -> bool:
        """False where no keys are required."""
        return self.tenant is not UNKNOWN

    def may_use(self, name: str, *, model: str) -> bool:
        """`name` is one of those of `model`. A key for a model is valid for its aliases; not the other way round."""
        allowed = self.tenant.models
        return allowed is None or name in allowed or model in allowed

    def priority(self, wanted: int) -> int:
        """The priority of a request with `wanted`: at most that of its tenant."""
        return min(wanted, self.tenant.priority) if self.known else wanted

    def cache_salt(self, wanted: str) -> str:
        """What separates its prefixes and sessions from those of others; `wanted` separates its own from each other."""
        if not self.known or (self.tenant.share_cache and not wanted):
            return wanted
        whose = "shared" if self.tenant.share_cache else f"tenant {self.tenant.name}"
        text = f"{whose}\0{wanted}".encode("utf-8", "surrogatepass")
        return blake2b(text, key=self.cache_secret, digest_size=16).hexdigest()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """For the answer."""
        return [] if self._usage is None else rate_headers(self.tenant, self._usage)

    async def arrive(self) -> None:
        """Count the request and its place among those that run. Raises `ApiError` 429."""
        tenant = self.tenant
        if self.limits is None or not (tenant.requests_per_minute or tenant.concurrency):
            return
        lease = self.request_id if tenant.concurrency else ""
        self._arrival = await self._take(self.limits, Ask(requests=1, lease=lease))

    async def reserve(self, tokens: int, *, choices: int = 1) -> None:
        """Count the tokens that the request is expected to use, and its choices: each is a request to the limits, of
        which `arrive` has counted one. Raises `ApiError` 429."""
        tenant, further = self.tenant, choices - 1
        if self.limits is None:
            return
        if tenant.tokens_per_minute or (further and tenant.requests_per_minute):
            self._reserved = await self._take(self.limits, Ask(tokens=tokens, requests=further))
            self._reserved_tokens = tokens
        if tenant.concurrency:
            for number in range(further):
                lease = f"{self.request_id}-{number + 1}"
                self._further.append((lease, await self._take(self.limits, Ask(lease=lease))))

    def used(self, tokens: int) -> None:
        """The tokens that it has used in fact."""
        self._used_tokens = tokens

    def leave(self) -> None:
        """The request has ended, however it ended."""
        if self.limits is None:
            return
        if self.known and self._used_tokens:
            self.limits.metrics.used(self.tenant.name, self._used_tokens)
        if self._reserved is not None:
            beyond = self._used_tokens - self._reserved_tokens
            self.limits.settle(self.tenant, self._reserved, tokens=beyond, lease="")
        for lease, taken in self._further:
            self.limits.settle(self.tenant, taken, tokens=0, lease=lease)
        if self._arrival is not None and self.tenant.concurrency:
            self.limits.settle(self.tenant, self._arrival, tokens=0, lease=self.request_id)

    async def _take(self, limits: TenantLimits, ask: Ask) -> Taken:
        taken = await limits.take(self.tenant, ask)
        self._usage = taken.usage
        if taken.usage.refused is not Refused.NOTHING:
            limits.metrics.limited(self.tenant.name, taken.usage.refused.value)
            raise refusal(self.tenant, taken.usage, ask)
        return taken
