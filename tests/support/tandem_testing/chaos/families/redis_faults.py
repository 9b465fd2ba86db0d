"""Redis killed, hanging, full, read-only, poisoned, gone for good, or elsewhere (15 to 20, 48)."""

import asyncio
import contextlib
import ipaddress
import re
from collections.abc import AsyncIterator
from pathlib import Path

import redis.asyncio

from tandem_engine.base.linux import die_with_parent
from tandem_services.common.sockets import free_port
from tandem_services.router.keys import Keys
from tandem_testing.chaos.fleet import REDIS_NAME, Shape
from tandem_testing.chaos.names import why_not
from tandem_testing.chaos.scenario import PATIENCE_S, SPEAK_TIMEOUT_S, Run, scenario
from tandem_testing.chaos.streams import Ask, Kind, Load
from tandem_testing.redis_server import RedisServer
from tandem_testing.waiting import until

INDEX_BACK_S = 30.0
OUTAGE_S = 15.0
"""Longer than any lease of the registry (`keys.FENCE_AFTER_MS`)."""
NAMED = Shape(named=True)
ANOTHER_ADDRESS = "127.0.0.2"
ADDRESS_FOUND_S = 5.0
POISONINGS = 6
POISON_TURNS = 6
"""Requests go out at several moments between two heartbeats."""


async def steady(run: Run, load: Load) -> None:
    """More requests while the fault lasts: they are routed without Redis."""
    load.send(run.asks(Kind.PLAIN, count=8, tokens=32, first=400))
    await until(lambda: load.begun >= len(load.answers), PATIENCE_S, "the new ones speak")


async def routed_by_redis(run: Run) -> bool:
    """Whether every gateway asks Redis where to send a request. Not always: on a busy machine an answer may come later
    than a request waits for it."""
    asking = {
        answer.gateway
        for answer in await run.works(4 * len(run.fleet.gateways))
        if any(attempt["source"] == "redis" for attempt in await run.attempts(answer))
    }
    return asking == {gateway.url for gateway in run.fleet.gateways}


async def back_in_use(run: Run, within_s: float = INDEX_BACK_S) -> None:
    began = run.now()
    await until(lambda: routed_by_redis(run), PATIENCE_S, "Redis is asked again")
    took, allowed = run.now() - began, run.allowed(within_s)
    run.expect(took <= allowed, f"Redis was used again after {took:.0f} s, {allowed:.0f} s are allowed")
    run.notes.append(f"Redis is asked again after {took:.1f} s")


@scenario(15)
async def the_routers_part_in_redis_dies(run: Run) -> None:
    """The router is a library in each gateway. What it has elsewhere is its functions in Redis, and Redis itself.

    Both go, and Redis stays away for longer than any lease lasts.
    """
    asked: list[Ask] = []

    async def fault(load: Load) -> None:
        run.fleet.redis.command("FUNCTION", "FLUSH")
        await steady(run, load)
        run.fleet.redis.kill()
        gone = run.now()
        while run.now() - gone < OUTAGE_S:
            await asyncio.sleep(0.5)
            wave = run.asks(Kind.PLAIN, Kind.GREEDY, count=2, tokens=200, first=600 + len(asked))
            load.send(wave)
            asked.extend(wave)
            await until(lambda: load.begun >= len(load.answers), SPEAK_TIMEOUT_S, "the new ones speak")

    answers = await run.under_fault(run.asks(Kind.GREEDY, Kind.PLAIN), fault)
    late = [answer for answer in answers if answer.ask in asked]
    sources = {attempt["source"] for answer in late for attempt in await run.attempts(answer)}
    run.expect(sources == {"local"}, f"without Redis requests were routed by {sources}")
    run.notes.append(f"{len(late)} requests routed in {OUTAGE_S:g} s without Redis")
    run.fleet.redis.restart()
    await back_in_use(run)


@scenario(16, quick=True)
async def redis_is_killed_and_comes_back_empty(run: Run) -> None:
    async def fault(load: Load) -> None:
        run.fleet.redis.kill()
        await steady(run, load)
        run.fleet.redis.restart()

    await run.under_fault(run.asks(Kind.GREEDY, Kind.PLAIN), fault)
    await back_in_use(run)


@scenario(17)
async def redis_hangs(run: Run) -> None:
    async def fault(load: Load) -> None:
        run.fleet.redis.pause()
        await steady(run, load)
        run.fleet.redis.resume()

    await run.under_fault(run.asks(Kind.GREEDY, Kind.PLAIN), fault)
    await back_in_use(run)


@contextlib.asynccontextmanager
async def handed_over(folder: Path) -> AsyncIterator[RedisServer]:
    """A node of a Redis cluster that answers everything with MOVED: another node has all slots."""
    nodes = []
    try:
        for name in ("left", "taker"):
            flags = ("--cluster-enabled", "yes", "--cluster-config-file", str(folder / f"{name}.conf"))
            nodes.append(RedisServer.start(*flags, "--cluster-port", str(free_port()), before_exec=die_with_parent))
        left, taker = nodes
        taker.command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        left.command("CLUSTER", "MEET", "127.0.0.1", str(taker.port), taker.extra[-1])
        await until(lambda: left.command("GET", "x").startswith("-MOVED"), PATIENCE_S, "another node has the slots")
        left.command("CONFIG", "RESETSTAT")
        yield left
    finally:
        for node in nodes:
            node.stop()


@scenario(18, shape=Shape(proxied=True))
async def redis_is_full_then_read_only_then_handed_over(run: Run) -> None:
    server, lines = run.fleet.redis, run.fleet.redis_lines.values()
    homes = [line.target for line in lines]

    async def fault(load: Load) -> None:
        server.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
        server.command("CONFIG", "SET", "maxmemory", "1")
        await steady(run, load)
        server.command("CONFIG", "SET", "maxmemory", "0")
        server.command("REPLICAOF", "127.0.0.1", "1")
        load.send(run.asks(Kind.PLAIN, count=8, tokens=32, first=440))
        await until(lambda: load.begun >= len(load.answers), PATIENCE_S, "the new ones speak")
        server.command("REPLICAOF", "NO", "ONE")
        for line in lines:
            line.target = lambda: ("127.0.0.1", left.port)
            line.cut()
        load.send(run.asks(Kind.PLAIN, count=8, tokens=256, first=480))
        await until(lambda: load.begun >= len(load.answers), SPEAK_TIMEOUT_S, "the new ones speak")
        await until(lambda: "errorstat_MOVED" in left.command("INFO", "errorstats"), PATIENCE_S, "MOVED was said")
        for line, home in zip(lines, homes, strict=True):
            line.target = home
            line.cut()

    async with handed_over(run.fleet.folder) as left:
        await run.under_fault(run.asks(Kind.GREEDY, Kind.PLAIN), fault)
    await back_in_use(run)


@scenario(19)
async def redis_is_poisoned(run: Run) -> None:
    starts = [part.starts for part in run.fleet.parts()]

    async def fault(load: Load) -> None:
        client = redis.asyncio.Redis(port=run.fleet.redis.port)
        try:
            for step in range(POISONINGS):
                # However quick the machine is, a stream has output while this poison works.
                load.send(run.asks(Kind.GREEDY, count=1, tokens=1500, first=10 + step))
                await until(lambda: load.begun >= len(load.answers), SPEAK_TIMEOUT_S, "all speak")
                await poison(client, run.fleet.keys, step)
                for turn in range(POISON_TURNS):
                    if turn == POISON_TURNS - 1:
                        # The first one may have ended by now.
                        load.send(run.asks(Kind.GREEDY, count=1, tokens=1500, first=30 + step))
                    first = 450 + 2 * (POISON_TURNS * step + turn)
                    asked = run.asks(Kind.PLAIN, count=2, tokens=16, first=first)
                    load.send(asked)
                    await asyncio.sleep(0.3)
                    refused = [load.answers[ask].error for ask in asked if load.answers[ask].error]
                    run.expect(not refused, f"poison {step}, {0.3 * turn:.1f} s after it: {refused[:1]}")
        finally:
            await client.aclose()

    await run.under_fault(run.asks(Kind.GREEDY, Kind.PLAIN, count=4, tokens=1500), fault)
    run.expect([part.starts for part in run.fleet.parts()] == starts, "a process died of what Redis said")
    await back_in_use(run)


async def poison(client: "redis.asyncio.Redis", keys: Keys, step: int) -> None:
    """One kind of malformed data after the other, where the router and the workers read."""
    fleet, owner, meta = keys.shared
    incarnations = [name.decode() for name in await client.hkeys(fleet)] if await client.type(fleet) == b"hash" else []
    match step:
        case 0:  # all workers seem to have the blocks of all
            sets = [keys.blocks(name) for name in incarnations]
            for name in sets:
                await client.sunionstore(name, *sets)
        case 1:  # wrong types
            for name in incarnations:
                await client.delete(keys.blocks(name))
                await client.rpush(keys.blocks(name), "x", "y")
                await client.set(keys.cursor(name), "rubbish")
        case 2:  # rows that mean nothing, and workers that never were
            for name in [*incarnations, "ghost-0@9999999999999999999", "no incarnation", ""]:
                await client.hset(fleet, name, b"\xff" * 400)
            await client.hset(owner, "decode-0", "ghost-0@1")
        case 3:  # an epoch of another time
            await client.hset(meta, mapping={"epoch": "rubbish", "generation": "-7", "last_call": "1e300"})
        case 4:  # huge
            await client.hset(fleet, mapping={f"many-{number}@1": b"x" for number in range(20_000)})
            await client.hset(keys.worker("decode-0"), mapping={f"f{number}": "x" * 50 for number in range(5_000)})
        case _:  # not even a hash
            await client.delete(fleet)
            await client.rpush(fleet, "a", "list")


@scenario(48, shape=NAMED, why_not=why_not)
async def a_name_fails_and_then_has_another_address(run: Run) -> None:
    """Redis is the only process that others find by a name: workers register the addresses that they listen at."""
    fleet, older = run.fleet, run.fleet.redis
    listed = [older.command("HGETALL", fleet.keys.worker(worker.id)) for worker in fleet.workers]
    endpoints = re.findall(r"tcp://([^\s:]+):", "".join(listed))
    run.expect(len(endpoints) >= 2 * len(fleet.workers), f"only {len(endpoints)} addresses are registered")
    run.expect(all(map(_is_address, endpoints)), f"a worker registered a name: {endpoints}")
    # A quiet moment: what does not answer in 20 ms, as when 64 requests come at once, gets another connection.
    await until(lambda: routed_by_redis(run), PATIENCE_S, "every gateway has a connection")
    fleet.names.forget()
    await until(lambda: routed_by_redis(run), PATIENCE_S, "the connections that are open live on")

    async def fault(load: Load) -> None:
        fleet.redis = RedisServer(host=ANOTHER_ADDRESS, port=older.port, before_exec=die_with_parent)
        fleet.redis.restart()
        older.kill()
        await steady(run, load)

    await run.under_fault(run.asks(Kind.GREEDY, Kind.PLAIN), fault)
    fleet.names.point(REDIS_NAME, ANOTHER_ADDRESS)
    await back_in_use(run, ADDRESS_FOUND_S)


def _is_address(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


@scenario(20)
async def redis_and_a_decode_worker_die_together(run: Run) -> None:
    lost = await run.lost_attempts()

    async def fault(load: Load) -> None:
        victim = await run.busiest_decode(load)
        run.fleet.redis.kill()
        victim.kill()
        await steady(run, load)
        run.fleet.redis.restart()

    await run.under_fault(run.asks(Kind.GREEDY, Kind.SEEDED), fault, speaking=max(2, run.scale.streams // 3))
    run.expect(await run.lost_attempts() > lost, "no stream was on the worker that died")
    await back_in_use(run)
