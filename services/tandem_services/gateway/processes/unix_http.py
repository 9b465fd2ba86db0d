"""One HTTP request to a process of this machine, over its Unix socket."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httptools

READ_BYTES = 1 << 16

HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"expect", b"te", b"trailer", b"upgrade")
)
"""Headers of one connection, which are not passed on."""

Headers = Iterable[tuple[bytes, bytes]]


@dataclass(slots=True)
class Answer:
    """A response whose head has come. Its parser's callbacks fill it."""

    reader: asyncio.StreamReader
    bodiless: bool = False
    """To HEAD: its Content-Length is that of another answer."""
    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    complete: bool = False
    _head_complete: bool = False
    _parts: list[bytes] = field(default_factory=list)
    _parser: httptools.HttpResponseParser = field(init=False)

    def __post_init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status, self._head_complete = self._parser.get_status_code(), True
        self.complete = self.bodiless

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self.complete = True

    async def head(self) -> None:
        """Until the status is known. Raises `ConnectionError` for an end before that."""
        while not self._head_complete:
            await self._more()

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises `ConnectionError` when it ends before its end."""
        while True:
            parts, self._parts = self._parts, []
            for part in parts:
                yield part
            if self.complete and not self._parts:
                return
            await self._more()

    async def read(self) -> bytes:
        return b"".join([part async for part in self.parts()])

    async def _more(self) -> None:
        data = await self.reader.read(READ_BYTES)
        if not data:
            raise ConnectionResetError("the process closed the connection before the end of its answer")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ConnectionAbortedError(f"the process does not answer with HTTP: {error}") from error


@asynccontextmanager
async def ask(
    socket: Path, method: str, target: str, *, headers: Headers = ((b"host", b"localhost"),), body: bytes = b""
) -> AsyncIterator[Answer]:
    """The answer of the process that listens at `socket`; its head has come. Raises `OSError` without one."""
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        lines = [f"{method} {target} HTTP/1.1".encode("latin-1")]
        lines += [b"%b: %b" % header for header in headers if header[0] not in HOP_BY_HOP]
        lines += [b"connection: close", b"content-length: %d" % len(body), b"", b""]
        writer.write(b"\r\n".join(lines) + body)
        await writer.drain()
        answer = Answer(reader, bodiless=method == "HEAD")
        await answer.head()
        yield answer
    finally:
        writer.close()
