"""Server-sent events over plain ASGI: a JSON document each, in OpenAI's two manners.

    chat, completions    `data:` alone, and `[DONE]` at the end
    responses            `event:` with the document's type as well, and no such end

The status goes out with the first event, so that whatever fails before it still has a status of its own.
Events that are ready together leave in one write.
"""

from collections.abc import Iterable

from starlette.types import Send

DONE = b"data: [DONE]\n\n"


def data_event(document: bytes) -> bytes:
    return b"data: " + document + b"\n\n"


def named_event(name: str, document: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + document + b"\n\n"


_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies that buffer whole responses would undo streaming.
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """One streamed response. `send` waits while the client does not read, which bounds our buffers."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def write(self, events: bytes) -> None:
        """Any number of whole events."""
        if not events:
            return
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def finish(self, events: bytes) -> None:
        """The last events."""
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    async def _start(self) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})


async def send_json(send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """A whole response with a JSON body."""
    fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode("ascii"))]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body})
