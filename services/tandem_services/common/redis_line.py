"""One connection to Redis that all commands of a client share: sent as they come, answered in the order of the line.

    command ─▶ sent ─▶ stands in line ─▶ its reply        the reader hands replies out: first come, first served
                            └ given up: keeps its place, its reply is read and dropped

A line is opened by the first command, and by the first one after it has broken. It breaks for all who stand in it:
what they sent may have been carried out or not, and nothing is sent twice. Once somebody has waited too long, the line
is retired: who stands in it may still be answered, who comes later has another one, as a connection that says nothing
may be one that nobody is at the other end of. Not so while it is being opened: looking up a name and connecting may
take longer than a command waits, and whoever comes later finds the line open.

Redis carries out one command after the other anyway: a connection for each of many commands at once gains nothing, and
to open, lend and check them costs a gateway more than the commands.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from redis.exceptions import InvalidResponse, ResponseError

OPEN_S = 1.0
"""A connection that is not there by then is given up."""
READING_TURNS = 4
"""Turns of the event loop in which bytes that have arrived become a reply: read, parsed, handed out, one to spare."""


class Wire(Protocol):
    """What is used of redis-py's connections, which know addresses, TLS, passwords and the protocol."""

    async def connect(self) -> None: ...

    def pack_command(self, *args: Any) -> list[bytes]: ...

    async def send_packed_command(self, command: list[bytes], check_health: bool = True) -> None:
        """Writes before it waits for anything."""
        ...

    async def read_response(self) -> Any: ...

    async def disconnect(self, nowait: bool = False) -> None: ...


class Line:
    """One connection, from its opening to its end. Raises whatever ended it, in all who stand in it."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._opened = asyncio.Event()
        self._failure: Exception | None = None
        self.reader = asyncio.create_task(self._serve(), name="redis replies")

    @property
    def broken(self) -> bool:
        return self._failure is not None

    @property
    def opening(self) -> bool:
        """Neither open yet nor broken."""
        return not self._opened.is_set()

    async def send(self, args: tuple[Any, ...]) -> "asyncio.Future[Any]":
        """The reply to one command, to come; it fails with `ResponseError` when Redis refuses the command."""
        if not self._opened.is_set():
            await self._opened.wait()
        if self._failure is not None:
            raise self._failure
        packed = self._wire.pack_command(*args)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(reply)
        await self._wire.send_packed_command(packed, check_health=False)
        return reply

    async def _serve(self) -> None:
        try:
            async with asyncio.timeout(OPEN_S):
                await self._wire.connect()
            self._opened.set()
            while True:
                await self._hand_out()
        except Exception as error:  # noqa: BLE001  # raised in everybody who waits
            self._break(error)
        finally:
            self._break(ConnectionError("the connection was closed"))
            await self._wire.disconnect(nowait=True)

    async def _hand_out(self) -> None:
        refused = None
        try:
            answer = await self._wire.read_response()
        except ResponseError as error:
            answer, refused = None, error
        if not self._waiting:
            raise InvalidResponse("a reply without a request")
        reply = self._waiting.popleft()
        if reply.done():
            return
        if refused is None:
            reply.set_result(answer)
        else:
            reply.set_exception(refused)

    def _break(self, error: Exception) -> None:
        if self._failure is not None:
            return
        self._failure = error
        self._opened.set()
        for reply in self._waiting:
            if not reply.done():
                reply.set_exception(error)


class RedisLine:
    """The line of one client: the one connection that there is now. Belongs to one event loop."""

    def __init__(self, make: Callable[[], Wire]) -> None:
        self._make = make
        self._line: Line | None = None
        self._readers: set[asyncio.Task[None]] = set()

    async def command(self, *args: Any, within_s: float) -> Any:
        """Raises `ResponseError` for what Redis refuses, `TimeoutError`, or what broke the connection."""
        line = self._line
        if line is None or line.broken:
            line = self._line = self._open()
        awaits_opening = line.opening
        try:
            return await _asked(line, args, within_s)
        except TimeoutError:
            if line is self._line and not awaits_opening:
                self._line = None
                # Until then those may be answered who came a moment ago.
                asyncio.get_running_loop().call_later(within_s, line.reader.cancel)
            raise

    async def close(self) -> None:
        """Idempotent."""
        self._line = None
        readers = [*self._readers]
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    def _open(self) -> Line:
        line = Line(self._make())
        self._readers.add(line.reader)
        line.reader.add_done_callback(self._readers.discard)
        return line


async def _asked(line: Line, args: tuple[Any, ...], within_s: float) -> Any:
    reply = None
    try:
        async with asyncio.timeout(within_s):
            reply = await line.send(args)
            return await asyncio.shield(reply)
    except TimeoutError:
        if reply is None:
            raise
        # A busy event loop looks at its clock before it reads what has long been there.
        for _ in range(READING_TURNS):
            await asyncio.sleep(0)
            if reply.done():
                return reply.result()
        raise
    finally:
        if reply is not None:
            reply.cancel()
