"""Bytes of one request and its response, read from and written to its connection without uvicorn's messages.

uvicorn writes head and body apart: two system calls, of which the first wakes the client for a head alone. `begin`
joins them. What it cannot write now goes through uvicorn, which waits for a client that does not read.
"""

from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HEADER_VALUE_RE, STATUS_LINE

Headers = Iterable[tuple[bytes, bytes]]
"""Names are constants of ours in lower case; values may have a client's text."""


BODILESS = (204, 304)


class ResponseBytes:
    """Of one cycle of uvicorn, whose state it keeps. Implements `Bodies`."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle

    @property
    def started(self) -> bool:
        started: bool = self._cycle.response_started
        return started

    def take_request(self) -> bytes | None:
        """The whole body of the request, once; None when its client has left. All of it is here."""
        cycle = self._cycle
        if cycle.disconnected:
            return None
        # As uvicorn does for each part: a client that asks whether to send it has not waited for the answer.
        cycle.waiting_for_100_continue = False
        cycle.flow.resume_reading()
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    def begin(self, status: int, headers: Headers, body: bytes, *, more: bool) -> bool:
        """Write head and beginning of the body at once; all of it unless there is `more`, which comes in chunks.

        False, and nothing written, when only uvicorn can. Raises `ValueError` for a value that would end its header.
        """
        cycle = self._cycle
        if cycle.response_started or self._is_blocked() or cycle.scope["method"] == "HEAD" or status in BODILESS:
            return False
        lines, chunked, closes = _head(status, [*cycle.default_headers, *headers])
        keep_alive = cycle.keep_alive and not closes
        if not keep_alive and not closes:
            lines.append(b"connection: close\r\n")
        if chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
            body = _chunk(body) if more else _chunk(body) + _LAST_CHUNK
        lines += (b"\r\n", body)
        data = b"".join(lines)
        # What is made can no longer fail.
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        cycle.chunked_encoding, cycle.keep_alive = chunked, keep_alive
        cycle.transport.write(data)
        if not more:
            self._complete()
        return True

    def is_ready(self) -> bool:
        # Once per token.
        cycle = self._cycle
        return (
            cycle.response_started
            and cycle.chunked_encoding is True
            and not cycle.response_complete
            and not cycle.disconnected
            and not cycle.flow.write_paused
            and not cycle.transport.is_closing()
        )

    def write(self, data: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _is_blocked(self) -> bool:
        cycle = self._cycle
        blocked: bool = cycle.disconnected or cycle.flow.write_paused or cycle.transport.is_closing()
        return blocked

    def _complete(self) -> None:
        """As uvicorn does after its last message."""
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()


_LAST_CHUNK = b"0\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def _head(status: int, headers: list[tuple[bytes, bytes]]) -> tuple[list[bytes], bool, bool]:
    """Its lines so far, whether the body comes in chunks, and whether the connection closes after it."""
    if HEADER_VALUE_RE.search(b"".join([value for _, value in headers])):
        raise ValueError(f"a header of a response with status {status} has control characters")
    chunked = b"content-length" not in [name for name, _ in headers]
    lines = [STATUS_LINE[status], *[b"%b: %b\r\n" % header for header in headers]]
    return lines, chunked, (b"connection", b"close") in headers
