"""What answers say about a tenant's limits: OpenAI's `x-ratelimit-…` headers, and its sentences in a 429."""

import math
from collections.abc import Iterator

from tandem_services.common.errors import ApiError
from tandem_services.gateway.access.tenants import Tenant
from tandem_services.router.usage_windows import Ask, Refused, Usage

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
    """429 for what `usage.refused` says."""
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
    """As OpenAI writes it: 250ms, 17s, 1m0s. Rounded up, so that who waits for it has waited enough."""
    if seconds < 1:
        return f"{math.ceil(max(seconds, 0.0) * 1000)}ms"
    whole = math.ceil(seconds)
    return f"{whole}s" if whole < 60 else f"{whole // 60}m{whole % 60}s"
