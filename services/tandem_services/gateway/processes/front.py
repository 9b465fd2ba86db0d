"""The administrators' port of a gateway of several processes. Each process checks keys and tokens itself.

/live                         the supervisor answers
/ready /health /ping          one process is ready
/metrics                      of all processes (`metric_sums`)
/requests/{id}/explain        of the process that had the request
/drain                        all processes
anything else                 the first process that answers: what the fleet knows, and the console, whose list of
                              requests and errors is then that of this process
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from starlette.types import Message, Receive, Scope, Send

from tandem_services.common.errors import ApiError, not_found, unavailable
from tandem_services.common.metrics import CONTENT_TYPE
from tandem_services.gateway.http.errors import UNEXPECTED, error_json
from tandem_services.gateway.http.interruption import ClientGoneError, client_of
from tandem_services.gateway.http.sse import send_json
from tandem_services.gateway.process_place import socket_of
from tandem_services.gateway.processes.metric_sums import MetricSums
from tandem_services.gateway.processes.unix_http import HOP_BY_HOP, Answer, ask

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
"""Of a request for administrators: bodies of chats in the playground are the largest."""

QUICKLY_S = 5.0
"""For the probes and the metrics of one process."""

READY_PATHS = frozenset(("/ready", "/health", "/ping"))
INTERNAL = "/internal/"


@dataclass(kw_only=True, slots=True)
class Front:
    """ASGI application."""

    folder: Path
    count: int
    on_drain: Callable[[Collection[int]], None] = lambda _: None
    """Called when the processes that answer, of these numbers, were sent the command to drain."""
    sums: MetricSums = field(default_factory=MetricSums)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began = False

        def watched(message: Message) -> Awaitable[None]:
            nonlocal began
            began = True
            return send(message)

        try:
            body = await _body(receive)
            with client_of(scope):
                await self._answer(_Asked(scope, body), watched)
        except ClientGoneError:
            return
        except Exception as error:
            refusal = error if isinstance(error, ApiError) else UNEXPECTED
            if refusal is UNEXPECTED:
                logger.exception("request of an administrator failed")
            if began:
                raise
            await send_json(send, refusal.status, error_json(refusal))

    async def _answer(self, asked: "_Asked", send: Send) -> None:
        match asked.path:
            case "/live":
                await send_json(send, 200, b'{"status":"ok"}')
            case path if path in READY_PATHS:
                await self._relay_first(asked, send, wanted=lambda status: status == 200, within_s=QUICKLY_S)
            case "/metrics":
                await self._metrics(asked, send)
            case "/drain":
                await self._drain(asked, send)
            case path if path.startswith("/requests/"):
                await self._relay_first(asked, send, wanted=lambda status: status != 404, within_s=QUICKLY_S)
            case path if path.startswith(INTERNAL):
                raise not_found("There is no such route.", "path")
            case _:
                await self._relay_first(asked, send, wanted=lambda _: True)

    async def _relay_first(
        self, asked: "_Asked", send: Send, *, wanted: Callable[[int], bool], within_s: float | None = None
    ) -> None:
        """The first answer with a `wanted` status, else the last one that came. A process that does not answer within
        `within_s` is passed over."""
        unwanted: tuple[Answer, bytes] | None = None
        for number in self._running():
            async with AsyncExitStack() as stack:
                try:
                    async with asyncio.timeout(within_s):
                        answer = await stack.enter_async_context(asked.of(socket_of(self.folder, number)))
                        if not wanted(answer.status):
                            unwanted = answer, await answer.read()
                            continue
                except OSError:
                    continue
                await _relay(answer, send)
                return
        if unwanted is None:
            raise _no_process()
        await _relay_read(*unwanted, send)

    async def _metrics(self, asked: "_Asked", send: Send) -> None:
        """A refusal of one process, of the method or the Host header, is that of all."""
        refusals = await asyncio.gather(*(self._scrape(number, asked) for number in range(self.count)))
        for refusal in refusals:
            if refusal is not None:
                await _relay_read(*refusal, send)
                return
        body = self.sums.exposition()
        length = (b"content-length", b"%d" % len(body))
        headers = [(b"content-type", CONTENT_TYPE.encode("ascii")), length]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _scrape(self, number: int, asked: "_Asked") -> tuple[Answer, bytes] | None:
        """Of a process that does not answer, the last ones count. Returns its answer if it refuses the request."""
        life = self.sums.life_of(number)
        try:
            async with asyncio.timeout(QUICKLY_S), asked.for_body(socket_of(self.folder, number)) as answer:
                body = await answer.read()
                if 400 <= answer.status < 500:
                    return answer, body
                if answer.status != 200:
                    raise ValueError(f"it answers with status {answer.status}")  # as what cannot be read
                self.sums.scraped(number, body, life=life)
        except (OSError, ValueError) as error:
            logger.warning("process %d of the gateway has no metrics: %s", number, error)
        return None

    async def _drain(self, asked: "_Asked", send: Send) -> None:
        """An order that one process refuses is not given to the next. One that does not answer in time is not counted,
        and drains on a signal."""
        accepted: dict[int, bytes] = {}
        for number in self._running():
            try:
                async with asyncio.timeout(QUICKLY_S), asked.of(socket_of(self.folder, number)) as answer:
                    status, body = answer.status, await answer.read()
            except OSError:
                continue  # it has ended, or hangs
            if status != 202:
                await send_json(send, status, body)
                return
            accepted[number] = body
        if not accepted:
            raise _no_process()
        self.on_drain(accepted)
        await send_json(send, 202, next(iter(accepted.values())))

    def _running(self) -> list[int]:
        """Those that serve, or have a moment ago. Raises `ApiError` 503 without any."""
        numbers = [number for number in range(self.count) if socket_of(self.folder, number).exists()]
        if not numbers:
            raise _no_process()
        return numbers


def _no_process() -> ApiError:
    return unavailable("No process of the gateway answers: they start, or have ended.", retry_after=1.0)


@dataclass(slots=True)
class _Asked:
    """One request, for each process that gets it."""

    scope: Scope
    body: bytes

    @property
    def path(self) -> str:
        path: str = self.scope["path"]
        return path

    def of(self, socket: Path) -> AbstractAsyncContextManager[Answer]:
        return self._ask(socket, self.scope["method"])

    def for_body(self, socket: Path) -> AbstractAsyncContextManager[Answer]:
        """The same with a body, also where only the head is asked for."""
        method = self.scope["method"]
        return self._ask(socket, "GET" if method == "HEAD" else method)

    def _ask(self, socket: Path, method: str) -> AbstractAsyncContextManager[Answer]:
        query = self.scope["query_string"]
        target = (self.scope["raw_path"] + (b"?" + query if query else b"")).decode("latin-1")
        return ask(socket, method, target, headers=self.scope["headers"], body=self.body)


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"request bodies are limited to {MAX_BODY_BYTES} bytes here", kind="BadRequestError")
        if not message.get("more_body", False):
            return bytes(body)


async def _relay(answer: Answer, send: Send) -> None:
    await _relay_head(answer, send)
    async for part in answer.parts():
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _relay_read(answer: Answer, body: bytes, send: Send) -> None:
    """The same of an answer whose body has been read."""
    await _relay_head(answer, send)
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _relay_head(answer: Answer, send: Send) -> None:
    headers = [header for header in answer.headers if header[0] not in HOP_BY_HOP and header[0] != b"date"]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
