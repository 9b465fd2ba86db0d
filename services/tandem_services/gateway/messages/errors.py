"""Errors as Anthropic shapes them, on its own routes: `{"type": "error", "error": {type, message}, "request_id"}`.

Their message names the field at fault, for which the shape has no place.
"""

from collections.abc import Mapping

from tandem_engine.logs import escape
from tandem_services.common.errors import ApiError
from tandem_services.gateway.answer_format import encode_json
from tandem_services.gateway.limits import MAX_ERROR_CHARACTERS
from tandem_services.gateway.messages.answer_schemas import MessageError, MessageErrorBody

PATH = "/v1/messages"

_KINDS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def speaks_anthropic(path: str) -> bool:
    """Whether clients of this path expect errors in this shape."""
    return path == PATH or path.startswith(f"{PATH}/")


def anthropic_error(error: ApiError, request_id: str) -> bytes:
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = escape(str(error)[:MAX_ERROR_CHARACTERS])
    return encode_json(MessageError(error=MessageErrorBody(type=kind, message=message), request_id=request_id))
