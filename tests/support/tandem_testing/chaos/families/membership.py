"""What is in Redis about members is wrong, or is another deployment's (64, 65).

Members are the workers that answer. So no request fails, no worker ends, and what was wrong is right again within
seconds. `tests/integration/test_redis_poison.py` has every field by itself; here a real system meets all hashes of one
kind at once, and some fields by themselves.
"""

import asyncio
from collections.abc import Awaitable, Callable

import redis.asyncio

from tandem_engine.ipc.keys import KeyPair
from tandem_testing.chaos.families.partitions import endless, starts_of
from tandem_testing.chaos.families.redis_faults import back_in_use, steady
from tandem_testing.chaos.fleet import START_TIMEOUT_S
from tandem_testing.chaos.parts import Worker
from tandem_testing.chaos.scenario import Run, scenario
from tandem_testing.chaos.streams import Kind, Load
from tandem_testing.waiting import until

BACK_S = 10.0
"""The registry is right again."""
VALUES: dict[str, str | bytes] = {
    "text": "garbage",
    "nothing": "",
    "negative": "-7",
    "huge": "9" * 400,
    "exponent": "1e300",
    "not a number": "nan",
    "far future": "99999999999999",
    "bytes": b"\xff\x00" * 60,
    "long": "x" * 100_000,
}
TYPES: dict[str, tuple[str, ...]] = {
    "string": ("SET", "garbage"),
    "list": ("RPUSH", "a", "b"),
    "set": ("SADD", "a", "b"),
    "sorted set": ("ZADD", "9e99", "a"),
    "hash": ("HSET", "a", "b"),
    "stream": ("XADD", "*", "a", "b"),
}
FIELDS_OF_OLD = ("deployment", "deployment_until", "generation")
"""Written into every hash, whether it has them or not: some have stopped fleets once."""
SINGLE_FIELDS = 40
MAX_KEYS = 16
"""Of one kind, drawn by the seed: the index by block alone has up to 4,096 hashes, and each request adds some."""
PAUSE_S = 0.3


async def a_few(run: Run, load: Load, what: str) -> None:
    """Requests between two heartbeats, and long ones where none speaks."""
    asked = run.fresh(run.asks(Kind.PLAIN, count=2, tokens=16, first=3000))
    load.send(asked)
    if load.speaking < 2:
        load.send(endless(run))
    await asyncio.sleep(PAUSE_S)
    refused = [load.answers[ask].error for ask in asked if load.answers[ask].error]
    run.expect(not refused, f"{what}: {refused[:1]}")


class Poison:
    """Everything that the fleet has in Redis, written over."""

    def __init__(self, run: Run, client: "redis.asyncio.Redis") -> None:
        self.run, self.client = run, client
        self.overwritten = 0

    async def kinds(self, type_name: str | None = None) -> dict[str, list[str]]:
        """Keys of the fleet, or those of one type, by the part of their name that follows the prefix."""
        prefix = self.run.fleet.keys.prefix
        found: dict[str, list[str]] = {}
        for key in sorted([key.decode() async for key in self.client.scan_iter(f"{prefix}*", _type=type_name)]):
            found.setdefault(key.removeprefix(prefix).partition(":")[0], []).append(key)
        return {kind: self.run.random.sample(keys, min(len(keys), MAX_KEYS)) for kind, keys in found.items()}

    async def fields(self, key: str) -> list[bytes | str]:
        found = sorted(await self.client.hkeys(key)) if await self.client.type(key) == b"hash" else []
        return [*found, *FIELDS_OF_OLD]

    async def write(self, key: str, fields: list[bytes | str], value: str | bytes) -> None:
        if await self.client.type(key) not in (b"hash", b"none"):
            await self.client.delete(key)
        await self.client.hset(key, mapping=dict.fromkeys(fields, value))
        self.overwritten += len(fields)

    async def whole_hashes(self, load: Load) -> None:
        for name, value in VALUES.items():
            for kind, keys in (await self.kinds("hash")).items():
                for key in keys:
                    await self.write(key, await self.fields(key), value)
                await a_few(self.run, load, f"{name} in {len(keys)} hashes {kind}")

    async def single_fields(self, load: Load) -> None:
        drawn = self.run.random
        for _ in range(SINGLE_FIELDS):
            kinds = await self.kinds("hash")
            key = drawn.choice(kinds[drawn.choice([*kinds])])
            field, name = drawn.choice(await self.fields(key)), drawn.choice([*VALUES])
            await self.write(key, [field], VALUES[name])
            await a_few(self.run, load, f"{name} in {field!r} of {key}")

    async def other_types(self, load: Load) -> None:
        for kind, keys in (await self.kinds()).items():
            name = self.run.random.choice([*TYPES])
            command, *arguments = TYPES[name]
            for key in keys:
                await self.client.delete(key)
                await self.client.execute_command(command, key, *arguments)
            await a_few(self.run, load, f"a {name} at {len(keys)} keys {kind}")


@scenario(64, timeout_s=1200.0)
async def every_field_of_the_registry_is_overwritten(run: Run) -> None:
    starts, overwritten = starts_of(run), 0

    async def fault(load: Load) -> None:
        nonlocal overwritten
        async with redis.asyncio.Redis.from_url(run.fleet.redis_url) as client:
            poison = Poison(run, client)
            await poison.whole_hashes(load)
            await poison.single_fields(load)
            await poison.other_types(load)
            overwritten = poison.overwritten
        load.send(endless(run))

    await run.under_fault(endless(run), fault)
    run.notes.append(f"{overwritten} fields were overwritten")
    run.expect(starts_of(run) == starts, "a process ended because of what is in Redis")
    await back_in_use(run, BACK_S)
    for role in ("decode", "prefill"):
        await registers_in_spite_of(run, run.fleet.of_role(role)[0])


async def registers_in_spite_of(run: Run, victim: Worker) -> None:
    """A worker starts while all that it reads of others in Redis is overwritten again and again."""
    starts, name = victim.part.starts, run.random.choice([*VALUES])
    async with redis.asyncio.Redis.from_url(run.fleet.redis_url) as client:
        poison, (_, owner, meta) = Poison(run, client), run.fleet.keys.shared

        async def registered() -> bool:
            for key in (meta, owner):
                await poison.write(key, await poison.fields(key), VALUES[name])
            await asyncio.sleep(PAUSE_S)
            return victim.part.starts > starts and await run.fleet.is_ready(victim.url)

        victim.kill()
        await until(registered, START_TIMEOUT_S, f"{victim.id} registers, {name} in {meta}", victim.part.log_text)
    run.notes.append(f"{victim.id} was started with {name} in every field of owner and meta")
    await run.fleet.all_ready(START_TIMEOUT_S)
    await run.works()


async def with_a_second_deployment(run: Run, then: Callable[[Load], Awaitable[None]]) -> None:
    """Another deployment's worker, with the same cluster name and the name of one of ours, while `then` happens."""
    other_keys = run.fleet.folder / "other-keys.json"
    KeyPair.generate().save(other_keys)
    foreign = await run.fleet.add_worker("decode-0", "decode", kept=False, curve_keys=str(other_keys))
    try:
        await until(
            lambda: run.fleet.is_ready(foreign.url), START_TIMEOUT_S, "the other one serves", foreign.part.log_text
        )
        computed = await run.fleet.metric(foreign.url, "tandem_worker_prompt_tokens_total")
        await run.under_fault(endless(run), then)
        run.expect(foreign.part.alive, "the second deployment was ended")
        more = await run.fleet.metric(foreign.url, "tandem_worker_prompt_tokens_total") - computed
        run.expect(more == 0, f"the other deployment's worker computed {more:g} tokens of prompts of this one")
    finally:
        await run.fleet.remove_worker(foreign)


@scenario(65)
async def a_second_deployment_takes_the_cluster_name_after_a_wipe(run: Run) -> None:
    starts = starts_of(run)

    async def fault(load: Load) -> None:
        for _ in range(3):
            run.fleet.redis.command("FLUSHALL")
            await steady(run, load)
            ready = await asyncio.gather(*(run.fleet.is_ready(gateway.url) for gateway in run.fleet.gateways))
            run.expect(all(ready), "a gateway is not ready")
        load.send(endless(run))

    await with_a_second_deployment(run, fault)
    run.expect(starts_of(run) == starts, "a process ended because of another deployment")
    await back_in_use(run)
