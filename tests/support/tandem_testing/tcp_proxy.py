"""A TCP proxy that misbehaves on demand, between any two processes of a test.

    proxy = await TcpProxy.open(lambda: ("127.0.0.1", 6379))
    …                                   # clients connect to proxy.port
    proxy.weather = Weather(delay_s=0.5)
    proxy.cut()                         # every connection is reset, new ones are taken
    await proxy.close()

What goes wrong is one frozen `Weather`; it holds for open connections from the next piece of data on.

    calm          bytes go through as they come
    delay_s       each piece arrives this much later, and up to `jitter_s` more
    bytes_per_s   a slow line, in each direction of each connection
    stalls, stall_s  this share of the pieces comes `stall_s` late: what a TCP user sees of lost packets
    silent        nothing goes through and nothing is closed: a cable is pulled, connections are half open
    unanswered    the same in one direction: what the server says never arrives
    unheard       the same in the other one: what clients say never arrives
    refusing      open connections stay, new ones are reset
"""

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

PIECE = 65_536
BLINK_S = 0.02
"""How often a silent line is looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weather:
    """What a proxy does to the bytes. The default does nothing."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0
    """0: no limit."""
    stalls: float = 0.0
    """Share of pieces that come late, 0 to 1."""
    stall_s: float = 0.2
    """TCP's shortest wait before it sends a lost packet again."""
    silent: bool = False
    unanswered: bool = False
    unheard: bool = False
    refusing: bool = False


CALM = Weather()
Address = tuple[str, int]


@dataclass(eq=False, kw_only=True, slots=True)
class TcpProxy:
    """Listens on a loopback port and connects each client to whatever `target` names at that moment."""

    target: Callable[[], Address]
    """Raises `LookupError` while there is no target."""
    weather: Weather = CALM
    connections: int = 0
    """Taken so far."""
    held: int = 0
    """Pieces and connections that a silent line has kept so far: evidence that it was in use."""
    _server: asyncio.Server | None = None
    _open: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: "set[asyncio.Task[None]]" = field(default_factory=set)
    _random: random.Random = field(default_factory=lambda: random.Random(1))

    @classmethod
    async def open(cls, target: Callable[[], Address], *, host: str = "127.0.0.1", port: int = 0) -> "TcpProxy":
        proxy = cls(target=target)
        proxy._server = await asyncio.start_server(proxy._accept, host, port, limit=PIECE)
        return proxy

    @property
    def port(self) -> int:
        assert self._server is not None, "open() has not been called"
        return int(self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        """Reset every open connection, in the middle of whatever it carries."""
        for writer in [*self._open]:
            _reset(writer)
        self._open.clear()

    async def close(self) -> None:
        """Idempotent."""
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own: asyncio's streams report one of theirs that is cancelled as an error.
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.add(writer)
        try:
            await self._connect(reader, writer)
        finally:
            self._open.discard(writer)
            writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._until_delivered()
        if self.weather.refusing:
            _reset(writer)
            return
        try:
            there = await asyncio.open_connection(*self.target(), limit=PIECE)
        except (OSError, LookupError):
            _reset(writer)
            return
        self._open.add(there[1])
        try:
            await self._both_ways(reader, writer, *there)
        finally:
            self._open.discard(there[1])
            there[1].close()

    async def _both_ways(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
    ) -> None:
        ways = [
            asyncio.create_task(self._carry(reader, far_writer, lambda: self.weather.unheard)),
            asyncio.create_task(self._carry(far_reader, writer, lambda: self.weather.unanswered)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stopped: Callable[[], bool]
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(PIECE):
                await self._suffer(len(piece))
                self.held += stopped()
                while stopped():  # noqa: ASYNC110  tests set the weather as a plain attribute
                    await asyncio.sleep(BLINK_S)
                writer.write(piece)
                await writer.drain()

    async def _until_delivered(self) -> None:
        self.held += self.weather.silent
        while self.weather.silent:  # noqa: ASYNC110  tests set the weather as a plain attribute
            await asyncio.sleep(BLINK_S)

    async def _suffer(self, size: int) -> None:
        await self._until_delivered()
        weather = self.weather
        late = weather.delay_s + self._random.uniform(-1, 1) * weather.jitter_s
        if weather.bytes_per_s:
            late += size / weather.bytes_per_s
        if weather.stalls and self._random.random() < weather.stalls:
            late += weather.stall_s
        if late > 0:
            await asyncio.sleep(late)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST: the other side sees a connection that broke, not one that ended."""
    sock: socket.socket | None = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
