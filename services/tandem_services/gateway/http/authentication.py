"""Authenticates requests: ASGI middleware inside `RequestBoundary`, and the check of administrators' commands.

Every path except those of probes needs a key. Unknown paths need one too, so that clients without a key do not learn
which exist. The path is taken byte by byte from the request line, never from a header (Starlette CVE-2026-48710).

    1. identity   exactly one `Authorization: Bearer KEY` header, or `x-api-key: KEY` as Anthropic's clients send; both
                  only with the same key. Anything else is a 401
    2. rights     administrators' paths need an administrator's key: 403
    3. limits     requests with a cost are counted, and occupy a slot until they end: 429
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem_services.common.errors import ApiError
from tandem_services.common.tokens import OrderAccess
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.access.keys import MAX_KEY_CHARACTERS, KeyWatch
from tandem_services.gateway.access.tenants import AccessMetrics, Tenant, TenantLimits
from tandem_services.gateway.http.middleware import identify_caller, identity_of

PROBES = frozenset({"/live", "/ready", "/health", "/ping"})
_KEY = re.compile(rb"[\x21-\x7e]{1,%d}" % MAX_KEY_CHARACTERS)
_BEARER = re.compile(rb"[Bb][Ee][Aa][Rr][Ee][Rr] +([\x21-\x7e]{1,%d}) *" % MAX_KEY_CHARACTERS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Parts that authentication uses. One instance per gateway."""

    keys: KeyWatch
    limits: TenantLimits
    metrics: AccessMetrics
    cache_secret: bytes
    open_paths: frozenset[str] = PROBES
    admin_paths: Collection[str] | None = ()
    """Paths that only administrators may use; None: every path."""
    admin_folders: tuple[str, ...] = ()
    """So are paths that begin with one of these."""

    def is_for_administrators(self, path: str) -> bool:
        return self.admin_paths is None or path in self.admin_paths or path.startswith(self.admin_folders)


class Authentication:
    """The middleware. `access` None: authentication is disabled."""

    def __init__(self, app: ASGIApp, *, access: Access | None) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        access = self._access
        if access is None or scope["type"] != "http" or scope["path"] in access.open_paths:
            await self._app(scope, receive, send)
            return
        tenant = tenant_of(scope["headers"], access.keys, access.metrics)
        if access.is_for_administrators(scope["path"]) and not tenant.admin:
            access.metrics.refused("forbidden")
            raise ApiError(403, "This key may not use administrators' routes.", kind="PermissionDeniedError")
        caller = Caller(
            tenant=tenant,
            cache_secret=access.cache_secret,
            limits=access.limits,
            request_id=identity_of(scope).request_id,
        )
        identify_caller(scope, caller)
        try:
            if scope["method"] == "POST":
                await caller.arrive()
            await self._app(scope, receive, send)
        finally:
            caller.leave()


def tenant_of(headers: Sequence[tuple[bytes, bytes]], keys: KeyWatch, metrics: AccessMetrics) -> Tenant:
    """Whose key a request with these headers (lower-case names) has. Raises `ApiError` 401."""
    tenant = keys.ring.find(_key_of(headers, metrics))
    if tenant is None:
        metrics.refused("unknown")
        raise _unauthorized("Incorrect API key provided.")
    return tenant


def _key_of(headers: Sequence[tuple[bytes, bytes]], metrics: AccessMetrics) -> str:
    """Raises `ApiError` 401 unless the request brings exactly one."""
    bearers = [value for name, value in headers if name == b"authorization"]
    plain = [value for name, value in headers if name == b"x-api-key"]
    if not bearers and not plain:
        metrics.refused("missing")
        raise _unauthorized("You didn't provide an API key. Send it as Authorization: Bearer KEY.")
    found = [_BEARER.fullmatch(value) for value in bearers] + [_KEY.fullmatch(value) for value in plain]
    keys = {match[match.lastindex or 0] for match in found if match is not None}
    if None in found or len(bearers) > 1 or len(plain) > 1 or len(keys) != 1:
        metrics.refused("malformed")
        raise _unauthorized("One API key must be given, once: as Authorization: Bearer KEY, or as x-api-key: KEY.")
    return keys.pop().decode("ascii")


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, kind="AuthenticationError", reason="invalid_api_key")


_KINDS = {401: "AuthenticationError", 403: "PermissionDeniedError", 415: "UnsupportedMediaTypeError"}


def require_order(request: Request, access: OrderAccess, *, by_key: bool = False) -> None:
    """Raise `ApiError` unless it is a command. `by_key`: its API key is enough, and it brings no token."""
    refusal = replace(access, needs_token=not by_key).refusal(request)
    if refusal is not None:
        raise ApiError(refusal.status, refusal.message, kind=_KINDS[refusal.status])
