"""One HTTP connection: bounds on its cost while no request handler can enforce them.

uvicorn alone waits forever for a request head, and keeps all of one that never ends. This class adds bounds:

    1. accepted  at most MAX_CONNECTIONS. One more closes a connection without a response in progress, or gets a 503
    2. head      complete within HEAD_TIMEOUT_S and MAX_HEAD_BYTES, counted from the connection or its own first byte;
                 else 408, 414 or 431 and the end. Bytes that are no HTTP get a 400
    3. request   handled by the application: `middleware` bounds the head, `http.body` the body. Here a body in too many
                 tiny pieces is a 400, because each piece costs as much as a large one
    4. response  written as fast as the client reads. A client that reads nothing for SEND_STALL_S while data is
                 buffered counts as disconnected: its request could otherwise outlive its deadline
    5. idle      until the next request: uvicorn's keep-alive. When the gateway shuts down, for LINGER_S more: a client
                 cannot know yet, and a request that it has just sent would get no answer. That answer closes

A client that closes its sending side counts as disconnected, because it cannot be distinguished from one that is gone,
and its request would be computed for no client.

An error is never written where the response of another request is expected: earlier requests are answered first. If
that is impossible, as during the response to a request whose body still arrives, the connection closes silently.
"""

import asyncio
import logging
import math
import sys
import uuid
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tandem_services.common.errors import ApiError, bad_request, unavailable
from tandem_services.gateway.http.errors import UNEXPECTED, error_json
from tandem_services.gateway.http.interruption import Client, introduce
from tandem_services.gateway.http.response_bytes import ResponseBytes
from tandem_services.gateway.limits import (
    HEAD_TIMEOUT_S,
    LINGER_S,
    MAX_BODY_PIECES,
    MAX_CONNECTIONS,
    MAX_HEAD_BYTES,
    MAX_URL_BYTES,
    MIN_PIECE_BYTES,
    SEND_STALL_S,
    url_too_long,
)

logger = logging.getLogger(__name__)

CONNECTIONS_RETRY_S = 1.0


class GatewayConnection(HttpToolsProtocol):
    """uvicorn's connection, with the bounds above."""

    _deadline: asyncio.TimerHandle | None = None
    """Ends a head that does not arrive. None while a request is answered, and while the client owes nothing."""
    _stalled: asyncio.TimerHandle | None = None
    """Ends a client that does not read. None while less is buffered than the limit at which writers wait."""
    _unsent = 0
    """Bytes that were kept for it when that was looked at last."""
    _lingers: asyncio.TimerHandle | None = None
    """Ends it after shutdown has begun, unless a request is answered then."""
    _in_head = False
    _head_bytes = 0
    _body_pieces = 0
    _body_bytes = 0
    _rests_since: float | None = None
    """Event loop time at which the last request was answered; None before the first and during the next."""
    _clients: deque[tuple[Any, Client]]
    """Of the requests that have no whole response yet, oldest first, with uvicorn's cycles."""
    _final_error: ApiError | None = None
    """What is wrong with the bytes after the requests that are being answered."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._clients = deque()
        if len(self.connections) > MAX_CONNECTIONS and not self._end_an_idle_one():
            message = f"This gateway takes at most {MAX_CONNECTIONS} connections at once. Try again later."
            self._end_with(unavailable(message, retry_after=CONNECTIONS_RETRY_S))
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        self._reads()
        if self._lingers is not None:
            self._lingers.cancel()
        super().connection_lost(exc)
        self._clients_left()

    def _clients_left(self) -> None:
        """uvicorn notes it for the newest request alone."""
        for cycle, client in self._clients:
            cycle.disconnected = True
            client.left()
        self._clients.clear()

    def shutdown(self) -> None:
        """Called by the server once, when it ends."""
        if self.answering:
            super().shutdown()
        else:
            self._lingers = self.loop.call_later(LINGER_S, self._end_if_idle)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reads()

    def data_received(self, data: bytes) -> None:
        """A boundary: an exception of what handles `data` would otherwise end the connection without a word."""
        try:
            self._receive(data)
        except Exception:
            logger.exception("request bytes could not be handled")
            self._give_up()

    def _give_up(self) -> None:
        """After an exception: a request that an application has whole is answered by it, any other gets a 500. Then
        the connection ends."""
        cycle: Any = self.cycle
        if self._belongs_to_the_next and self._in_head:
            self._final_error = UNEXPECTED
        elif self._belongs_to_the_next:
            cycle.keep_alive = False
        else:
            if self._in_head or self._may_be_answered_here:
                self.transport.write(_FAILED)
            self.transport.close()

    def _receive(self, data: bytes) -> None:
        if self.transport.is_closing() or self._final_error is not None:
            return
        began_in_head = self._in_head
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head:
            # Most heads come whole, and need no timer.
            self._expect_head()
            self._bound_head(len(data) if began_in_head else 0)
        elif not self.answering:
            self._expect_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._rests_since = None
        self._head_bytes = self._body_pieces = self._body_bytes = 0

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        client, scope = Client(ResponseBytes(self.cycle)), cast("Scope", self.scope)
        introduce(scope, client)
        self._clients.append((self.cycle, client))
        self._in_head = False
        self._head_arrived()
        if self._lingers is not None:
            super().shutdown()

    def on_body(self, body: bytes) -> None:
        if self.transport.is_closing():
            return
        super().on_body(body)
        self._body_pieces += 1
        self._body_bytes += len(body)
        if self._body_pieces > MAX_BODY_PIECES and self._body_bytes < MIN_PIECE_BYTES * self._body_pieces:
            message = f"request body comes in more than {MAX_BODY_PIECES} pieces of under {MIN_PIECE_BYTES} bytes each"
            self._end_with(bad_request(message))

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._clients and self._clients[-1][0] is self.cycle:
            self._clients[-1][1].has_sent_all = True

    def on_response_complete(self) -> None:
        while self._clients and self._clients[0][0].response_complete:
            self._clients.popleft()
        super().on_response_complete()
        if not self.answering:
            self._rests_since = self.loop.time()
        if self._final_error is not None and not self.answering and not self.transport.is_closing():
            self.transport.write(_whole_response(self._final_error))
            self.end()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  # uvicorn's name for its own sentence
        """What uvicorn answers to bytes that are no HTTP. It takes exceptions of the methods above for the same."""
        error = sys.exception()
        cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
        if cause is not None and not isinstance(cause, (UnicodeDecodeError, httptools.HttpParserError)):
            raise cause
        self._end_with(bad_request("this is not a valid HTTP request"))

    @property
    def answering(self) -> bool:
        """Whether a request is being answered."""
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def has_rested(self, seconds: float) -> bool:
        """Whether it has waited for its next request for so long. A new connection has not: its first is on its way."""
        return self._rests_since is not None and self.loop.time() - self._rests_since >= seconds

    def end(self) -> None:
        """Close, without a word, once what was written before has been sent."""
        self.transport.close()

    def _end_if_idle(self) -> None:
        if not self.answering:
            self.end()

    def _end_an_idle_one(self) -> bool:
        return end_one(self.connections, lambda other: other is not self and not other.answering)

    def _expect_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_arrived(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _head_is_late(self) -> None:
        self._deadline = None
        if self.answering:
            # The head of the next request, after a slow response: reading is paused while that is written.
            self._expect_head()
            return
        message = f"request headers did not arrive within {HEAD_TIMEOUT_S:g} s"
        self._end_with(ApiError(408, message, kind="RequestTimeoutError"))

    def _expect_reading(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self._stalled = self.loop.call_later(SEND_STALL_S, self._is_not_read)

    def _reads(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _is_not_read(self) -> None:
        self._stalled = None
        if self.transport.get_write_buffer_size() < self._unsent:
            self._expect_reading()
            return
        self.transport.abort()

    def _bound_head(self, size: int) -> None:
        """Of a head that has not ended; `size` more of it is here."""
        self._head_bytes += size
        if len(self.url) > MAX_URL_BYTES:
            self._end_with(url_too_long())
        elif self._head_bytes > MAX_HEAD_BYTES:
            message = f"the request line and headers are limited to {MAX_HEAD_BYTES} bytes"
            self._end_with(ApiError(431, message, kind="RequestHeaderFieldsTooLargeError"))

    def _end_with(self, refusal: ApiError) -> None:
        if self._belongs_to_the_next:
            self._final_error = refusal
            return
        if self._may_be_answered_here:
            self.transport.write(_whole_response(refusal))
        self.end()

    @property
    def _belongs_to_the_next(self) -> bool:
        """Whether all requests before what is wrong have come whole, and are being answered."""
        cycle: Any = self.cycle
        return self.answering and not cycle.more_body

    @property
    def _may_be_answered_here(self) -> bool:
        """Whether the next bytes that the client gets would be taken as the answer to what is wrong."""
        cycle: Any = self.cycle
        if cycle is None:
            return True
        if cycle.response_complete:
            # What still arrives of a body whose request was refused has had its answer.
            return not cycle.more_body
        return cycle.more_body and not cycle.response_started and not self.pipeline


def end_one(connections: set[Any], may_end: Callable[[GatewayConnection], bool]) -> bool:
    """Close one of `connections` that may end. Returns whether there was one."""
    for each in connections:
        if isinstance(each, GatewayConnection) and may_end(each):
            connections.discard(each)
            each.end()
            return True
    return False


def _whole_response(refusal: ApiError) -> bytes:
    body = error_json(refusal)
    lines = [
        f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"x-request-id: {uuid.uuid4().hex}",
        "connection: close",
    ]
    if refusal.retry_after is not None:
        lines.append(f"retry-after: {math.ceil(refusal.retry_after)}")
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body


_FAILED = _whole_response(UNEXPECTED)
"""Made before anything can fail."""
