"""A Redis that goes wrong while it is used: for any reply, routing continues without it [redis-is-optional]."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tandem_engine.config import Role
from tandem_services.common.redis_client import (
    BreakerState,
    CircuitBreaker,
    RedisAddress,
    RedisClient,
    RedisUnavailableError,
)
from tandem_services.router.decision import RouteQuery, Source
from tandem_services.router.keys import Keys
from tandem_services.router.redis_functions import FunctionLibrary
from tandem_services.router.router import Router
from tandem_testing.redis_server import RedisServer
from tandem_testing.router_builders import LASTING, MODEL, PAGE, Fleet, make_record, patient_router
from tandem_testing.service_clock import ServiceClock
from tandem_testing.waiting import until

RECORDS = (make_record("p", Role.PREFILL), make_record("d1", Role.DECODE), make_record("d2", Role.DECODE))

ANSWERS = {  # [redis-is-optional]
    "NOSCRIPT": b"-NOSCRIPT No matching script. Please use EVAL.\r\n",
    "WRONGPASS": b"-WRONGPASS invalid username-password pair or user is disabled.\r\n",
    "NOAUTH": b"-NOAUTH Authentication required.\r\n",
    "NOPERM": b"-NOPERM this user has no permissions to run the 'fcall' command\r\n",
    "LOADING": b"-LOADING Redis is loading the dataset in memory\r\n",
    "MISCONF": b"-MISCONF Redis is configured to save RDB snapshots, but is unable to persist to disk.\r\n",
    "BUSY": b"-BUSY Redis is busy running a script. You can only call FUNCTION KILL or SHUTDOWN NOSAVE.\r\n",
    "CLUSTERDOWN": b"-CLUSTERDOWN The cluster is down\r\n",
    "MOVED": b"-MOVED 3999 127.0.0.1:6381\r\n",
    "MOVED to nowhere": b"-MOVED\r\n",
    "TRYAGAIN": b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n",
    "an error without a word": b"-\r\n",
    "a number": b":7\r\n",
    "nothing": b"$-1\r\n",
    "an empty list": b"*0\r\n",
    "a text that is no document": b"$3\r\n{]x\r\n",
    "a document of another shape": b'$12\r\n{"decode":5}\r\n',
    "HTTP": b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
    "TLS": b"\x15\x03\x01\x00\x02\x02\x46",
    "a length that is none": b"$x\r\n",
    "an end": b"",
}


class Relay:
    """Between a router and a Redis. While it has an `answer`, that is all that a command gets, and then the end."""

    def __init__(self, port: int) -> None:
        self.answer: bytes | None = None
        self.hangs_up = False
        """After whatever was answered to one command."""
        self._target = port
        self._open: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        redis_reader, redis_writer = await asyncio.open_connection("127.0.0.1", self._target)
        back = asyncio.create_task(self._back(redis_reader, writer))
        try:
            while data := await reader.read(1 << 16):
                if self.answer is not None:
                    writer.write(self.answer)
                    await writer.drain()
                    return
                redis_writer.write(data)
        except ConnectionError:
            pass
        finally:
            back.cancel()
            self._open.discard(writer)
            redis_writer.close()
            writer.close()

    def cut(self) -> None:
        """End the connections there are, as whatever is before Redis may."""
        for writer in self._open:
            writer.close()

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            if self.hangs_up:
                writer.close()
                return


@asynccontextmanager
async def routing(server) -> AsyncIterator[tuple[Router, Relay, Fleet]]:
    """A router that reaches its Redis through a relay, and workers that reach it themselves."""
    server.wipe()
    relay = Relay(server.port)
    async with (
        Fleet.of(server, **LASTING) as fleet,
        await asyncio.start_server(relay.serve, "127.0.0.1", 0) as listener,
    ):
        address = RedisAddress(url=f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}/0")
        router = patient_router(server, redis=address)
        await router.start()
        try:
            await fleet.join(router, *RECORDS)
            assert (await router.choose(query())).source is Source.REDIS
            yield router, relay, fleet
        finally:
            await router.stop()
            relay.cut()


def query() -> RouteQuery:
    return RouteQuery(request_id="r", model=MODEL, token_ids=tuple(range(10 * PAGE)), max_tokens=16)


@pytest.mark.parametrize("reply", ANSWERS)
async def test_invalid_redis_reply_falls_back_to_local_routing(server, caplog, reply):  # [redis-is-optional]
    async with routing(server) as (router, relay, _):
        relay.answer = ANSWERS[reply]
        with caplog.at_level(logging.WARNING):
            for _ in range(6):
                choice = await router.choose(query())
                assert (choice.source, choice.decode.worker_id in {"d1", "d2"}) == (Source.LOCAL, True)
                await router.release(choice)
        errors = [record for record in caplog.records if "Redis at" in record.getMessage()]
        assert len(errors) <= 2, "one line a minute of each of its connections"


@pytest.mark.parametrize("reply", ["LOADING", "an end"])
async def test_redis_decides_again_after_valid_replies(server, reply):  # [redis-is-optional]
    async with routing(server) as (router, relay, fleet):
        relay.answer = ANSWERS[reply]
        assert (await router.choose(query())).source is Source.LOCAL
        relay.answer = None

        async def asked_again() -> bool:
            for record in RECORDS:
                await fleet.beat(record)
            return (await router.choose(query())).source is Source.REDIS

        await until(asked_again, 60.0, "Redis decides again")


async def test_redis_closing_after_each_command_fails_no_request(server):  # [redis-is-optional]
    async with routing(server) as (router, relay, _):
        relay.hangs_up = True
        relay.cut()
        for _ in range(20):
            choice = await router.choose(query())
            assert choice.decode.worker_id in {"d1", "d2"}
            await router.release(choice)


async def test_functions_are_loaded_first_after_redis_outage():
    server, clock = RedisServer.start(), ServiceClock()
    client = RedisClient(RedisAddress(url=server.url), timeout_s=30.0, breaker=CircuitBreaker(clock=clock))
    library = FunctionLibrary(client)
    keys = Keys("default")
    report = ("g", "", 0, 0)
    try:
        await library.call("fair_sync", keys.fairness, *report)
        server.kill()
        for _ in range(client.breaker.failures_to_open):
            with pytest.raises(RedisUnavailableError):
                await client.command("PING")
        assert not client.available
        server.restart()
        clock.advance(client.breaker.open_s)
        await library.call("fair_sync", keys.fairness, *report)
        assert client.breaker.state is BreakerState.CLOSED
    finally:
        await client.close()
        server.stop()
