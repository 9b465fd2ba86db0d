"""One connection to Redis for all commands of a client.

All commands share one connection; they are sent as they come and answered in that order:

    command ─▶ sent ─▶ queued ─▶ its reply            the reader assigns replies in the order of the commands
                         └ timed out: keeps its place; its reply is read and dropped

The first command opens the connection, and so does the first one after it broke. When it breaks, all queued commands
fail: they may have been executed or not, and nothing is sent twice.

After a timeout the connection is retired: queued commands may still be answered, later ones get a new connection,
because a silent connection may have lost its peer. A connection that is still being opened is not retired, because
name resolution and connecting may take longer than the deadline of a command.

A connection is retired as well when its server refuses a command because it is not the primary (`NOT_PRIMARY`). After a
failover the address leads to another server, while connections to the former primary stay open for as long as it runs.
The next command resolves the name again. The circuit breaker bounds how often that happens.

Redis executes commands one at a time, so a connection for each concurrent command gains nothing; opening, pooling and
checking them costs a gateway more than the commands.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from redis.exceptions import AskError, ClusterDownError, InvalidResponse, ReadOnlyError, ResponseError, TryAgainError

OPEN_S = 1.0
"""A connection that is not there by then is given up."""

NOT_PRIMARY = (ReadOnlyError, ClusterDownError, AskError, TryAgainError)
"""READONLY, CLUSTERDOWN, MASTERDOWN, ASK, MOVED, TRYAGAIN: the server is not, or not yet, the one that takes commands.

LOADING ends the connection by itself, as redis-py counts it among the connection errors.
"""

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
    """One connection, from its opening to its end. Raises what ended it in all queued commands."""

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
        except Exception as error:  # noqa: BLE001  # raised in all queued commands
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
            if not awaits_opening:
                self._retire(line, within_s)
            raise
        except NOT_PRIMARY:
            self._retire(line, within_s)
            raise

    async def close(self) -> None:
        """Idempotent."""
        self._line = None
        readers = [*self._readers]
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    def _retire(self, line: Line, within_s: float) -> None:
        """Later commands get a new connection; earlier ones may still be answered within `within_s` seconds."""
        if line is self._line:
            self._line = None
            asyncio.get_running_loop().call_later(within_s, line.reader.cancel)

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
        # A busy event loop checks its clock before it reads what has long arrived.
        for _ in range(READING_TURNS):
            await asyncio.sleep(0)
            if reply.done():
                return reply.result()
        raise
    finally:
        if reply is not None:
            reply.cancel()
