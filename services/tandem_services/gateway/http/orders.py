"""The check of administrators' commands to a gateway, in the shape of its errors."""

from dataclasses import replace

from starlette.requests import Request

from tandem_services.common.errors import ApiError
from tandem_services.common.tokens import OrderAccess

_KINDS = {401: "AuthenticationError", 403: "PermissionDeniedError", 415: "UnsupportedMediaTypeError"}


def require_order(request: Request, access: OrderAccess, *, by_key: bool = False) -> None:
    """Raise `ApiError` unless it is a command. `by_key`: its API key is enough, and it brings no token."""
    refusal = replace(access, needs_token=not by_key).refusal(request)
    if refusal is not None:
        raise ApiError(refusal.status, refusal.message, kind=_KINDS[refusal.status])
