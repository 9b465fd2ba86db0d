"""Errors of the services, in addition to the engine's `EngineError` tree.

`ServiceError` is for operators: one sentence that names the cause and the fix.
`ApiError` is for clients of the HTTP API: a status and a fixed sentence, without paths, addresses or traces.
"""

from typing import ClassVar


class ServiceError(Exception):
    """Base of every error the services raise on purpose. The message is fit for an operator to read."""

    code: ClassVar[str] = "service_error"


class StartupError(ServiceError):
    """A process cannot start: a taken port, an absent file, a service that does not answer."""

    code = "startup_error"


class RemoteError(ServiceError):
    """A server that a command talks to does not answer, or answers with an error."""

    code = "remote_error"


class ApiError(ServiceError):
    """The error for an HTTP client, in OpenAI's format.

    `param` names the request field at fault; `retry_after` is in seconds and becomes a `Retry-After` header.
    """

    code = "api_error"

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        param: str | None = None,
        reason: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        """OpenAI's `type`, e.g. BadRequestError."""
        self.param = param
        self.reason = reason
        """OpenAI's `code`, e.g. context_length_exceeded."""
        self.retry_after = retry_after


def bad_request(message: str, param: str | None = None, *, reason: str | None = None) -> ApiError:
    """400: the request can never succeed as it is."""
    return ApiError(400, message, kind="BadRequestError", param=param, reason=reason)


def not_found(message: str, param: str | None = None, *, reason: str | None = None) -> ApiError:
    """404: no such route, model or record."""
    return ApiError(404, message, kind="NotFoundError", param=param, reason=reason)


def conflict(message: str, param: str | None = None, *, reason: str | None = None) -> ApiError:
    """409: something that the request builds on is not in the expected state."""
    return ApiError(409, message, kind="ConflictError", param=param, reason=reason)


def unavailable(message: str, *, retry_after: float) -> ApiError:
    """503: the same request may succeed after `retry_after` seconds."""
    return ApiError(503, message, kind="ServiceUnavailableError", retry_after=retry_after)


def internal_error(message: str) -> ApiError:
    """500: our fault; `message` is a fixed sentence."""
    return ApiError(500, message, kind="InternalServerError")


def timed_out(message: str) -> ApiError:
    """504: the deadline passed before an answer was complete."""
    return ApiError(504, message, kind="TimeoutError")
