"""The error that a caller gets for a request that the engine ended with one."""

from tandem_engine.errors import (
    EngineError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    SessionError,
    SessionLostError,
)
from tandem_engine.messages.outputs import Finish, FinishReason


def error_of(finish: Finish) -> EngineError:
    """Of a finish whose reason is error."""
    assert finish.reason is FinishReason.ERROR, f"{finish} is no failure"
    message = finish.error or "the request failed"
    match finish.code:
        case InvalidRequestError.code:
            return InvalidRequestError(message, param=finish.param)
        case SessionLostError.code:
            return SessionLostError(message)
        case SessionError.code:
            return SessionError(message)
        case QueueFullError.code:
            return QueueFullError(message)
    return RequestFailedError(message, reason=finish.code or "", retryable=finish.retryable)
