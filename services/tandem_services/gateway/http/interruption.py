"""Why the task of a request is cancelled before its end, and what its cancellation is turned into.

    the client disconnects   `Client`: the connection calls `left`. Its block raises `ClientGoneError`
    the deadline passes      `Limit`: one timer per request. Its block raises `ApiError` 504
    the drain ends           `Closing`: every running `Limit`. Its block raises `ApiError` 503

Each cancels the one task that answers the request. The `finally` blocks of its work then abort the request on every
worker. A block raises its own error only when nothing else has cancelled the task as well: of a deadline and a
disconnect in one iteration of the event loop, the disconnect counts, because there is no receiver of an error.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, TypeAlias

from starlette.types import Scope

from tandem_services.common.errors import ApiError, timed_out, unavailable

RETRY_S = 1.0


class ClientGoneError(Exception):
    """The client closed its connection; there is no receiver of a response."""


def shutting_down() -> ApiError:
    return unavailable("The gateway is shutting down. Send the request again.", retry_after=RETRY_S)


class _Cancelling:
    """A block that may cancel its own task, at most once at a time."""

    __slots__ = ("_before", "_cancelled", "_task")

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._before = 0
        """Requests to cancel the task that others had made before the block."""
        self._cancelled = False

    def _begin(self) -> None:
        self._task = task = asyncio.current_task()
        assert task is not None, "an answer is made by a task"
        self._before, self._cancelled = task.cancelling(), False

    def _cancel(self) -> None:
        """Does nothing outside of the block."""
        if self._task is not None and not self._cancelled:
            self._cancelled = True
            self._task.cancel()

    def _end(self) -> bool:
        """Whether the block has cancelled its task, and nothing else has."""
        task, self._task = self._task, None
        assert task is not None, "the block began"
        return self._cancelled and task.uncancel() <= self._before


class Bodies(Protocol):
    """Reads a request and writes its response without a task."""

    @property
    def started(self) -> bool:
        """Whether its head is written."""
        ...

    def take_request(self) -> bytes | None:
        """The whole body of the request, once, when all of it is here; None when its client has left."""
        ...

    def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes, *, more: bool) -> bool:
        """Write the head and the beginning of the body at once; all of it unless there is `more`.

        False, and nothing written, when it cannot be written now.
        """
        ...

    def is_ready(self) -> bool:
        """Whether `write` can write now: the response has begun, and its client reads."""
        ...

    def write(self, data: bytes) -> None:
        """Some more of the body, which is not the end, and not empty."""
        ...


AtOnce: TypeAlias = Callable[[int, Sequence[tuple[bytes, bytes]], bytes], bool]
"""Writes a whole response: status, headers, body. False, and nothing written, where it can only be sent."""


class Client(_Cancelling):
    """The client of one request, as its connection sees it. A block ends with `ClientGoneError` when it leaves."""

    __slots__ = ("_gone", "body", "has_sent_all")

    def __init__(self, body: Bodies | None = None) -> None:
        super().__init__()
        self._gone = False
        self.body = body
        """None where the server is not ours: what the application sends is the only way."""
        self.has_sent_all = False
        """The body of the request is known to be here."""

    def left(self) -> None:
        """Called by the connection, when it ends before the response is complete."""
        self._gone = True
        self._cancel()

    def __enter__(self) -> Self:
        if self._gone:
            raise ClientGoneError
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        only_reason = self._end()
        if only_reason and (error is None or isinstance(error, (Exception, asyncio.CancelledError))):
            raise ClientGoneError from error


_CLIENT = "tandem_client"


def introduce(scope: Scope, client: Client) -> None:
    """Called by the connection before the application gets the request."""
    scope[_CLIENT] = client


def client_of(scope: Scope) -> Client:
    """One that never leaves, where the server is not ours."""
    client: Client | None = scope.get(_CLIENT)
    return Client() if client is None else client


def forget_client(scope: Scope) -> None:
    """The request has ended. Idempotent."""
    scope.pop(_CLIENT, None)


@dataclass(slots=True)
class Closing:
    """One per gateway; belongs to its event loop."""

    ended: bool = False
    _running: "set[Limit]" = field(default_factory=set)

    def end(self) -> None:
        """End every answer that is being made, and each that begins later. Idempotent."""
        if self.ended:
            return
        self.ended = True
        for limit in tuple(self._running):
            limit.interrupt(shutting_down())

    def enter(self, limit: "Limit") -> None:
        """Raises `ApiError` 503 when `end` was called."""
        if self.ended:
            raise shutting_down()
        self._running.add(limit)

    def leave(self, limit: "Limit") -> None:
        self._running.discard(limit)


class Limit(_Cancelling):
    """The time of one request, from its creation. Used as a block around each part of the work that it bounds.

    `stop` it at the end of the request.
    """

    __slots__ = ("_closing", "_error", "_timer")

    def __init__(self, closing: Closing, seconds: float) -> None:
        super().__init__()
        self._closing = closing
        self._error: ApiError | None = None
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def stop(self) -> None:
        self._timer.cancel()

    def interrupt(self, error: ApiError) -> None:
        """The block that runs raises `error`, or else the next one. The first reason counts."""
        if self._error is None:
            self._error = error
            self._cancel()

    def __enter__(self) -> Self:
        if self._error is not None:
            raise self._error
        self._closing.enter(self)
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.leave(self)
        only_reason = self._end()
        if only_reason and kind is asyncio.CancelledError and self._error is not None:
            raise self._error from error

    def _expire(self) -> None:
        self.interrupt(timed_out("The request did not finish before its deadline."))
