"""Server-sent events over plain ASGI: one JSON document per event, in OpenAI's two formats.

    chat, completions    `data:` alone, and `[DONE]` at the end
    responses            `event:` with the type of the document as well, and no end marker

The status is sent with the first event, so that an earlier failure has a status of its own. Events that are ready at
the same time leave in one write.

A stream without a write for `WAITING_S`, while its request waits in the queue or for a worker, gets a comment, which
clients skip: proxies close connections that are silent for long.
"""

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
from starlette.types import Send

from tandem_services.gateway.http.interruption import AtOnce, Bodies

_encoder = msgspec.json.Encoder()

encode_json = _encoder.encode
"""JSON of any struct."""


WAITING_S = 9.5
"""Below 10 s, also when the event loop is late; above `ModelConfig.queue_s`, so that a refusal for want of any worker
has a status of its own."""

WAITING = b": waiting\n\n"
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
    """One streamed response. `send` waits while the client does not read, which bounds our buffers.

    Comments are written between entering and leaving it.
    """

    def __init__(
        self, send: Send, body: Bodies | None = None, headers: Callable[[], Iterable[tuple[bytes, bytes]]] = tuple
    ) -> None:
        """`body`: for what is written without waiting, if there is such a way. `headers`: further ones of the
        response, read when it starts."""
        self._headers = headers
        self._send = send
        self._body = body
        self._loop = asyncio.get_running_loop()
        self._written_at = self._loop.time()
        self._writing = False
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None
        self.started = False
        self.ended = False
        """The last events are on their way."""

    async def __aenter__(self) -> Self:
        self._timer = self._loop.call_later(WAITING_S, self._tick)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if self._comment is not None:
            await self._comment

    async def write(self, events: bytes) -> None:
        """Any number of whole events."""
        if events:
            await self._put(events, more=True)

    def is_ready(self) -> bool:
        """Whether `write_now` can write: the stream has begun, and nothing waits for the client."""
        return (
            self._body is not None
            and self.started
            and not self.ended
            and not self._writing
            and self._comment is None
            and self._body.is_ready()
        )

    def write_now(self, events: bytes) -> None:
        """As `write`, of a stream that is ready."""
        assert self._body is not None, "it is ready"
        if events:
            self._body.write(events)
            self._written_at = self._loop.time()

    async def finish(self, events: bytes) -> None:
        """The last events."""
        self._stop()
        await self._put(events, more=False)

    async def _put(self, events: bytes, *, more: bool) -> None:
        if self._comment is not None:
            # Waited for, not cancelled with the writer: half of it may be out.
            await asyncio.wait((self._comment,))
        await self._put_now(events, more=more)

    async def _put_now(self, events: bytes, *, more: bool) -> None:
        self._writing = True
        try:
            if not self.started:
                await self._start()
            self.ended = not more
            await self._send({"type": "http.response.body", "body": events, "more_body": more})
        finally:
            self._writing = False
            self._written_at = self._loop.time()

    async def _start(self) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, *self._headers()]})

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        due = self._written_at + WAITING_S
        now = self._loop.time()
        if now >= due and not self._writing and self._comment is None:
            self._comment = asyncio.create_task(self._put_now(WAITING, more=True), name="waiting")
            self._comment.add_done_callback(self._commented)
            due = now + WAITING_S
        self._timer = self._loop.call_at(max(due, now + 1.0), self._tick)

    def _commented(self, comment: "asyncio.Task[None]") -> None:
        self._comment = None
        comment.result()


async def send_json(
    send: Send,
    status: int,
    body: bytes,
    headers: Iterable[tuple[bytes, bytes]] = (),
    *,
    at_once: AtOnce | None = None,
) -> None:
    """A whole response with a JSON body. `at_once`: writes it without messages, where that is possible."""
    whole = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers]
    if at_once is not None and at_once(status, whole, body):
        return
    await send({"type": "http.response.start", "status": status, "headers": whole})
    await send({"type": "http.response.body", "body": body})


_PLACE = "\0"


class Around(NamedTuple):
    """An event without its text."""

    before: bytes
    after: bytes


class TextEvents:
    """Of one answer: what is around the text is encoded once for each choice."""

    __slots__ = ("_around", "_encode")

    def __init__(self, encode: Callable[[int, str], bytes]) -> None:
        """`encode` makes the event of a choice's text. After the text it contains nothing that clients have chosen."""
        self._encode = encode
        self._around: dict[int, Around] = {}

    def of(self, choice: int, text: str) -> bytes:
        """The bytes that `encode` would make."""
        around = self.around(choice)
        return around.before + encode_json(text) + around.after

    def around(self, choice: int) -> Around:
        """What is around the JSON of a text in the bytes that `encode` would make."""
        around = self._around.get(choice)
        if around is None:
            around = self._around[choice] = self._learn(choice)
        return around

    def _learn(self, choice: int) -> Around:
        before, place, after = self._encode(choice, _PLACE).rpartition(encode_json(_PLACE))
        assert place, "the event does not have its text"
        return Around(before, after)
