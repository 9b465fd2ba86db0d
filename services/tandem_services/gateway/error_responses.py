"""Errors as OpenAI shapes them: `{"error": {message, type, param, code}}`, all four keys, fixed sentences.

On Anthropic's routes they have its shape (`messages.errors`).
"""

import math

from starlette.types import Send

from tandem_engine.errors import InvalidRequestError
from tandem_engine.logs import escape
from tandem_services.common.errors import ApiError, bad_request, internal_error
from tandem_services.gateway.answer_format import encode_json
from tandem_services.gateway.limits import MAX_ERROR_CHARACTERS
from tandem_services.gateway.messages.errors import anthropic_error, speaks_anthropic
from tandem_services.gateway.openai_answers import ErrorBody, ErrorResponse
from tandem_services.gateway.sse import send_json

UNEXPECTED = internal_error("The gateway failed while answering. Its log has the cause under the request id.")


def as_api_error(error: Exception) -> ApiError | None:
    """The client's view of an error made on purpose; None for one that nobody expected."""
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
