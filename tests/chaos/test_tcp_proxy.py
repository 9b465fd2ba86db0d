"""The proxy does to a connection what it says it does."""

import asyncio
import contextlib

import pytest

from tandem_testing.tcp_proxy import CALM, TcpProxy, Weather
from tandem_testing.waiting import until

PATIENCE_S = 60.0


@pytest.fixture
async def proxy():
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1024):
                writer.write(piece)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    between = await TcpProxy.open(lambda: ("127.0.0.1", port))
    yield between
    await between.close()
    server.close()


@contextlib.asynccontextmanager
async def connected(proxy: TcpProxy):
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    yield reader, writer
    writer.close()


async def echoed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    writer.write(data)
    return await asyncio.wait_for(reader.readexactly(len(data)), PATIENCE_S)


async def test_calm_bytes_go_through_both_ways(proxy):
    async with connected(proxy) as (reader, writer):
        assert await echoed(reader, writer, b"x" * 200_000) == b"x" * 200_000
    assert proxy.connections == 1


async def test_cut_connection_is_reset_and_a_new_one_works(proxy):
    async with connected(proxy) as (reader, writer):
        await echoed(reader, writer, b"hello")
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(1), PATIENCE_S)
    async with connected(proxy) as (reader, writer):
        assert await echoed(reader, writer, b"again") == b"again"


async def test_silent_proxy_delivers_buffered_data_later(proxy):
    async with connected(proxy) as (reader, writer):
        await echoed(reader, writer, b"hello")
        proxy.weather = Weather(silent=True)
        waiting = asyncio.create_task(echoed(reader, writer, b"are you there"))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        proxy.weather = CALM
        assert await waiting == b"are you there"


@pytest.mark.parametrize(("weather", "reaches"), [(Weather(unanswered=True), True), (Weather(unheard=True), False)])
async def test_one_direction_lost_leaves_the_other_and_is_counted(weather, reaches):
    got = asyncio.Queue[bytes]()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(1024):
            got.put_nowait(piece)
            writer.write(piece)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    proxy = await TcpProxy.open(lambda: ("127.0.0.1", port))
    async with connected(proxy) as (reader, writer):
        await echoed(reader, writer, b"hello")
        assert got.get_nowait() == b"hello"
        assert proxy.held == 0
        proxy.weather = weather
        waiting = asyncio.create_task(echoed(reader, writer, b"there"))
        await until(lambda: proxy.held == 1, PATIENCE_S, "a piece is held")
        assert not waiting.done()
        assert got.empty() is not reaches
        proxy.weather = CALM
        assert await waiting == b"there"
    await proxy.close()
    server.close()


async def test_refusing_resets_new_connections_and_keeps_old_ones(proxy):
    async with connected(proxy) as (old_reader, old_writer):
        await echoed(old_reader, old_writer, b"hello")
        proxy.weather = Weather(refusing=True)
        async with connected(proxy) as (reader, _):
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(reader.read(1), PATIENCE_S)
        assert await echoed(old_reader, old_writer, b"still here") == b"still here"


async def test_proxy_without_a_target_resets_the_connection():
    def no_target() -> tuple[str, int]:
        raise LookupError("not started")

    proxy = await TcpProxy.open(no_target)
    try:
        async with connected(proxy) as (reader, _):
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(reader.read(1), PATIENCE_S)
    finally:
        await proxy.close()


async def test_delay_and_rate_hold_bytes_back(proxy):
    loop = asyncio.get_running_loop()
    proxy.weather = Weather(delay_s=0.05, bytes_per_s=100_000)
    async with connected(proxy) as (reader, writer):
        began = loop.time()
        await echoed(reader, writer, b"x" * 10_000)
        # Both ways: at least two delays, and twice 10 kB at 100 kB/s.
        assert loop.time() - began >= 0.3
