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
The next command finds the server again (`redis_places`). The circuit breaker bounds how often that happens.

All keys of a client are in one slot of a cluster, so one connection, to the slot's owner, is enough:

    MOVED  another node has the slot: that connection is retired, and the command goes to the owner. Nothing is sent
           twice that may have been executed: a redirected command was not.
    ASK    the slot is on its way to another node: this command goes there over a second connection, after ASKING.
           Commands without a key, which load functions, then go to both.

Redis executes commands one at a time, so a connection for each concurrent command gains nothing; opening, pooling and
checking them costs a gateway more than the commands.
"""

import asyncio
from collections import deque
from typing import Any

from redis.exceptions import AskError, ClusterDownError, InvalidResponse, MovedError, ReadOnlyError, ResponseError

from tandem_engine.base.addresses import Address
from tandem_services.common.redis_places import Places, Wire

OPEN_S = 1.0
"""A connection that is not there by then is given up."""

NOT_PRIMARY = (ReadOnlyError, ClusterDownError, AskError)
"""READONLY, CLUSTERDOWN, MASTERDOWN, and MOVED or ASK that lead nowhere: the server is not the one that takes commands.

LOADING ends the connection by itself, as redis-py counts it among the connection errors.
"""

HOPS = 4
"""Redirections of one command. A failover in the middle of a slot's move takes three."""

READING_TURNS = 4
"""Turns of the event loop in which bytes that have arrived become a reply: read, parsed, handed out, one to spare."""


class Line:
    """One connection, from its opening to its end. Raises what ended it in all queued commands."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
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

    async def send(self, args: tuple[Any, ...], *, asking: bool) -> "asyncio.Future[Any]":
        """The reply to one command, to come; it fails with `ResponseError` when Redis refuses the command.

        `asking`: the command comes after ASKING, which is valid for the next command alone.
        """
        if not self._opened.is_set():
            await self._opened.wait()
        if self._failure is not None:
            raise self._failure
        packed = self.wire.pack_command(*args)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if asking:
            packed = [*self.wire.pack_command("ASKING"), *packed]
            self._waiting.append(_dropped())
        self._waiting.append(reply)
        await self.wire.send_packed_command(packed, check_health=False)
        return reply

    async def _serve(self) -> None:
        try:
            async with asyncio.timeout(OPEN_S):
                await self.wire.connect()
            self._opened.set()
            while True:
                await self._hand_out()
        except Exception as error:  # noqa: BLE001  # raised in all queued commands
            self._break(error)
        finally:
            self._break(ConnectionError("the connection was closed"))
            await self.wire.disconnect(nowait=True)

    async def _hand_out(self) -> None:
        refused = None
        try:
            answer = await self.wire.read_response()
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

    def __init__(self, places: Places) -> None:
        self._places = places
        self._line: Line | None = None
        self._taker: tuple[Address, Line] | None = None
        """Where the slot goes, since an ASK and until a MOVED."""
        self._readers: set[asyncio.Task[None]] = set()

    async def command(self, *args: Any, within_s: float) -> Any:
        """Raises `ResponseError` for what Redis refuses, `TimeoutError`, or what broke the connection."""
        clock = asyncio.get_running_loop().time
        ends = clock() + within_s
        for hop in range(HOPS + 1):
            line = self._current()
            try:
                answer = await self._sent(line, args, within_s if hop == 0 else ends - clock(), within_s)
            except AskError as error:
                refusal, where = error, self._places.named(error, line.wire)
            else:
                if args[0] == "FUNCTION" and self._taker is not None and not self._taker[1].broken:
                    await self._sent(self._taker[1], args, ends - clock(), within_s)
                return answer
            if where is None:
                self._left(line, within_s)
                raise refusal
            if isinstance(refusal, MovedError):
                self._moved(line, where, within_s)
            else:
                return await self._sent(self._taking(where, within_s), args, ends - clock(), within_s, asking=True)
        raise refusal

    async def close(self) -> None:
        """Idempotent."""
        self._line = self._taker = None
        readers = [*self._readers]
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    async def _sent(
        self, line: Line, args: tuple[Any, ...], left_s: float, within_s: float, *, asking: bool = False
    ) -> Any:
        """`left_s`: of the `within_s` that each command of this client has."""
        awaits_opening = line.opening
        try:
            return await _reply(line, args, left_s, asking=asking)
        except TimeoutError:
            if not awaits_opening:
                self._retire(line, within_s)
            raise
        except AskError:
            raise
        except NOT_PRIMARY:
            self._left(line, within_s)
            raise

    def _current(self) -> Line:
        if self._line is None or self._line.broken:
            self._line = self._open(self._places.wire())
        return self._line

    def _left(self, line: Line, within_s: float) -> None:
        if line is self._line:
            self._places.left()
        self._retire(line, within_s)

    def _moved(self, line: Line, owner: Address, within_s: float) -> None:
        """Commands that the former owner refuses later find the connection to the new one."""
        if line is not self._line:
            return
        self._places.moved(owner)
        self._retire(line, within_s)
        if self._taker is not None and self._taker[0] == owner and not self._taker[1].broken:
            self._line = self._taker[1]
        elif self._taker is not None:
            self._end(self._taker[1], within_s)
        self._taker = None

    def _taking(self, address: Address, within_s: float) -> Line:
        """The connection to the node that takes the slot over."""
        if self._taker is not None and (self._taker[0] != address or self._taker[1].broken):
            self._end(self._taker[1], within_s)
            self._taker = None
        if self._taker is None:
            self._taker = (address, self._open(self._places.wire_to(address)))
        return self._taker[1]

    def _retire(self, line: Line, within_s: float) -> None:
        """Later commands get a new connection; earlier ones may still be answered within `within_s` seconds."""
        if line is self._line:
            self._line = None
        elif self._taker is not None and line is self._taker[1]:
            self._taker = None
        else:
            return
        self._end(line, within_s)

    def _end(self, line: Line, within_s: float) -> None:
        asyncio.get_running_loop().call_later(within_s, line.reader.cancel)

    def _open(self, wire: Wire) -> Line:
        line = Line(wire)
        self._readers.add(line.reader)
        line.reader.add_done_callback(self._readers.discard)
        return line


async def _reply(line: Line, args: tuple[Any, ...], within_s: float, *, asking: bool) -> Any:
    reply = None
    try:
        async with asyncio.timeout(within_s):
            reply = await line.send(args, asking=asking)
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


def _dropped() -> "asyncio.Future[Any]":
    """A reply that is read and that no command waits for."""
    reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    reply.cancel()
    return reply
