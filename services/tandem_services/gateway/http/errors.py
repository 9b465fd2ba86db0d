"""Error bodies in OpenAI's and in Anthropic's format, with fixed sentences.

Errors of routes under Anthropic's API have its format, all others OpenAI's.

    OpenAI       {"error": {message, type, param, code}}, always all four keys
    Anthropic    {"type": "error", "error": {type, message}, "request_id"}, on Anthropic's routes; the message names the
                 field at fault, because the format has no key for it
"""

import math
from collections.abc import Mapping

import msgspec
from starlette.types import Send

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.base.logs import escape
from tandem_services.common.errors import ApiError, bad_request, internal_error
from tandem_services.gateway.http.sse import encode_json, send_json
from tandem_services.gateway.limits import MAX_ERROR_CHARACTERS


class MessageErrorBody(msgspec.Struct, kw_only=True):
    type: str
    message: str


class MessageError(msgspec.Struct, kw_only=True, tag_field="type", tag="error"):
    error: MessageErrorBody
    request_id: str


class ErrorBody(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct, kw_only=True):
    error: ErrorBody


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


UNEXPECTED = internal_error("The gateway failed while answering. Its log has the cause under the request id.")


def as_api_error(error: Exception) -> ApiError | None:
    """The client's view of an expected error; None for an unexpected one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return bad_request(str(error), error.param)
    return None


def error_json(error: ApiError) -> bytes:
    body = ErrorBody(
        message=escape(str(error)[:MAX_ERROR_CHARACTERS]),
        type=error.kind,
        param=error.param,
        code=error.reason,
    )
    return encode_json(ErrorResponse(error=body))


def error_body(error: ApiError, *, path: str, request_id: str) -> bytes:
    """In the shape that clients of `path` expect."""
    return anthropic_error(error, request_id) if speaks_anthropic(path) else error_json(error)


async def send_error(send: Send, error: ApiError, *, path: str, request_id: str) -> None:
    headers = [(b"www-authenticate", b"Bearer")] if error.status == 401 else []
    if error.retry_after is not None:
        seconds = max(1, math.ceil(error.retry_after))
        headers.append((b"retry-after", str(seconds).encode("ascii")))
    await send_json(send, error.status, error_body(error, path=path, request_id=request_id), headers)
