"""In a large fleet a decision prices few workers, and chooses nearly as well as if it had priced all
(scripts/candidates.lua). The other library prices all of them, on the same Redis."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from statistics import mean

import pytest

from tandem_engine.config import Role
from tandem_engine.messages.stats import LinkReport
from tandem_services.router.cost import FOLLOWERS, Demand, Load
from tandem_services.router.decision import Absence
from tandem_services.router.index import IndexUpdate, Routed, UpdateKind
from tandem_services.router.keys import MAX_HOLDERS, RANKED_TOKENS
from tandem_services.router.registry import LeaseStatus, WorkerRecord
from tandem_testing.redis_server import REDIS_SERVER, RedisServer
from tandem_testing.router_builders import LASTING, MODEL, PAGE, Fleet, chain_of, make_load, make_record

pytestmark = pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")

PROMPT = tuple(range(1000))
CHAIN = chain_of(PROMPT)
OTHER = chain_of(tuple(range(5000, 6000)))
DEMAND = Demand(prompt_tokens=len(PROMPT), output_tokens=64, local_prefill_tokens=300)
SIZE = 60
LASTING_SWEEPS = {**LASTING, "SWEPT_BUCKETS": 4096, "SWEEP_EVERY_MS": 0}
"""Each heartbeat sweeps the whole index by block."""


@pytest.fixture(scope="module")
def server():
    process = RedisServer.start()
    yield process
    process.stop()


@pytest.fixture
async def fleet(server: RedisServer) -> AsyncIterator[Fleet]:
    async with Fleet.of(server, **LASTING) as workers:
        yield workers


@asynccontextmanager
async def second_library(server: RedisServer, **constants: int) -> AsyncIterator[Fleet]:
    """On the Redis as it is."""
    workers = Fleet(server, **{**LASTING, **constants})
    try:
        yield workers
    finally:
        await workers.close()


async def route(fleet: Fleet, *, seed: int = 1, chain: list[bytes] = CHAIN, **changes: object) -> Routed | None:
    settings = {"demand": DEMAND, "page_size": PAGE, "exclude": frozenset[str](), **changes}
    return await fleet.index.route(model=MODEL, chain=b"".join(chain), seed=seed, **settings)  # type: ignore[arg-type]


async def price(fleet: Fleet, *, seed: int) -> float:
    """Of the choice, which is released."""
    routed = await route(fleet, seed=seed)
    assert routed is not None
    await fleet.index.release(routed.reservation)
    return sum(term.seconds for term in routed.terms)


def drawn_load(random: Random) -> Load:
    return make_load(
        queue_tokens=random.choice([0.0, random.uniform(0.0, 20_000.0)]),
        prefill_rate=random.uniform(4000.0, 12_000.0),
        sequences=random.randrange(66),
        step_s=random.uniform(0.005, 0.02),
        room_tokens=random.choice([500.0, 1e5, 1e5, 1e5]),
        token_bytes=1e5,
        transfer_rate=random.uniform(2e9, 1e10),
    )


def drawn_shares(state: str, random: Random) -> list[int]:
    """Blocks of the prompt that each worker has."""
    match state:
        case "cold":
            return [0] * SIZE
        case "three holders":
            return [random.randint(20, len(CHAIN)) if number < 3 else 0 for number in range(SIZE)]
        case "shared":
            return [len(CHAIN) if number == 0 else len(CHAIN) // 4 for number in range(SIZE)]
        case _:
            return [random.randint(1, len(CHAIN)) for _ in range(SIZE)]


async def fill(fleet: Fleet, state: str, roles: list[Role], random: Random) -> None:
    for number, blocks in enumerate(drawn_shares(state, random)):
        links = tuple(
            LinkReport(peer=f"w{peer}@1", bytes_per_s=random.uniform(2e9, 1e10))
            for peer in random.sample(range(SIZE), 6)
        )
        record = make_record(f"w{number}", roles[number % len(roles)], load=drawn_load(random), links=links)
        await fleet.beat(record)
        await fleet.cache(record, CHAIN[:blocks])


@pytest.mark.parametrize("roles", [[Role.BOTH], [Role.PREFILL, Role.DECODE]], ids=["mixed", "pairs"])
@pytest.mark.parametrize("state", ["cold", "three holders", "shared", "ragged"])
async def test_choice_among_few_costs_little_more_than_the_best(server, fleet, state, roles):
    few, all_priced = [], []
    async with second_library(server, ALL_UP_TO=SIZE) as oracle:
        for seed in range(6):
            server.command("FLUSHALL")
            await fill(fleet, state, roles, Random(seed))
            for number in range(6):
                few.append(await price(fleet, seed=number))
                all_priced.append(await price(oracle, seed=number))
    assert all(cost >= best - 2e-4 for cost, best in zip(few, all_priced, strict=True))
    assert mean(few) <= 1.08 * mean(all_priced)


async def test_sole_worker_with_capacity_is_chosen_at_once(fleet):
    for number in range(SIZE):
        load = make_load(sequences=64) if number != 41 else make_load(sequences=63, step_s=0.02)
        await fleet.beat(make_record(f"w{number}", load=load))
    routed = await route(fleet)
    assert routed is not None
    assert routed.decode == "w41@1"


async def test_worker_with_the_prompt_is_found_in_a_large_fleet(fleet):
    for number in range(SIZE):
        record = make_record(f"w{number}", load=make_load(queue_tokens=100 if number == 41 else 0))
        await fleet.beat(record)
        if number == 41:
            await fleet.cache(record, CHAIN)
    routed = await route(fleet)
    assert routed is not None
    assert (routed.prefill or routed.decode, routed.matched_tokens) == ("w41@1", len(CHAIN) * PAGE)


async def test_equal_prompts_in_flight_meet_in_a_large_fleet(fleet):
    for number in range(SIZE):
        await fleet.beat(make_record(f"w{number}", load=make_load(prefill_rate=200.0)))
    chosen = [await route(fleet, seed=seed) for seed in range(4)]
    assert len({each.prefill or each.decode for each in chosen if each is not None}) == 1
    assert [each.matched_tokens for each in chosen if each is not None] == [0] + [len(CHAIN) * PAGE] * 3


async def test_idle_workers_share_the_prompts_of_a_large_fleet(fleet):
    for number in range(SIZE):
        await fleet.beat(make_record(f"w{number}"))
    random, chosen = Random(1), set()
    for seed in range(SIZE):
        routed = await route(fleet, seed=seed, chain=[random.randbytes(16) for _ in CHAIN])
        assert routed is not None
        chosen.add(routed.decode)
    assert len(chosen) > SIZE * 0.9


async def test_excluded_workers_do_not_hide_others(fleet):
    for number in range(SIZE):
        await fleet.beat(make_record(f"w{number}", load=make_load(queue_tokens=number)))
    routed = await route(fleet, exclude=frozenset(f"w{number}@1" for number in range(SIZE - 1)))
    assert routed is not None
    assert routed.decode == f"w{SIZE - 1}@1"


async def test_allowed_workers_are_the_only_candidates(fleet):
    for number in range(SIZE):
        await fleet.beat(make_record(f"w{number}", load=make_load(queue_tokens=number)))
    routed = await route(fleet, allowed=frozenset({"w50@1", "w51@1", "gone@1"}))
    assert routed is not None
    assert routed.decode == "w50@1"
    assert await route(fleet, allowed=frozenset()) is None


async def test_names_without_a_row_are_dropped_when_met(fleet):
    for number in range(SIZE):
        await fleet.beat(make_record(f"w{number}", load=make_load(queue_tokens=number)))
    await fleet.client.command("HDEL", fleet.keys.prefix + "fleet", *(f"w{number}@1" for number in range(50)))
    routed = await route(fleet)
    assert routed is not None
    assert routed.decode == "w50@1"
    assert not {f"w{number}@1" for number in range(50)} & await ranked(fleet, "prefill")


async def ranked(fleet: Fleet, role: str) -> set[str]:
    keys = await fleet.client.command("KEYS", f"{fleet.keys.prefix}least:*:{role}")
    assert isinstance(keys, list)
    names: set[str] = set()
    for key in keys:
        members = await fleet.client.command("ZRANGE", key, 0, -1)
        assert isinstance(members, list)
        names |= {str(name, "ascii") for name in members}
    return names


async def holders(fleet: Fleet) -> dict[bytes, list[bytes]]:
    """Tags by digest."""
    keys = await fleet.client.command("KEYS", f"{fleet.keys.prefix}holders:*")
    assert isinstance(keys, list)
    found = {}
    for key in keys:
        lists = await fleet.client.command("HGETALL", key)
        assert isinstance(lists, dict)
        for digest, tags in lists.items():
            found[digest] = [tags[at : at + 4] for at in range(0, len(tags), 4)]
    return found


@pytest.mark.parametrize("change", ["role", "model", "draining"])
async def test_worker_whose_role_or_model_changes_leaves_its_candidate_ranks(fleet, change):
    await fleet.beat(make_record("w", Role.PREFILL))
    changed = {
        "role": make_record("w", Role.DECODE),
        "model": make_record("w", Role.PREFILL, model="other"),
        "draining": make_record("w", Role.PREFILL, state=make_record("w").state.DRAINING),
    }[change]
    await fleet.beat(changed)
    keys = await fleet.client.command("KEYS", f"{fleet.keys.prefix}least:*")
    assert isinstance(keys, list)
    assert len(keys) == (0 if change == "draining" else 1)


async def test_ranks_and_index_of_another_type_are_dropped(fleet):
    records = [make_record(f"w{number}") for number in range(SIZE)]
    for record in records:
        await fleet.beat(record)
        await fleet.cache(record, CHAIN[:30])
    keys = await fleet.client.command("KEYS", f"{fleet.keys.prefix}*")
    assert isinstance(keys, list)
    for key in keys:
        if any(part in key for part in (b"least:", b"kinds:", b"holders:", b"tags")):
            await fleet.client.command("DEL", key)
            await fleet.client.command("SET", key, "x")
    routed = await route(fleet)
    if routed is not None:
        await fleet.index.release(routed.reservation)
    for record in records:
        await fleet.beat(record)
        await fleet.cache(record, CHAIN[:31])
    routed = await route(fleet)
    assert routed is not None
    assert routed.matched_tokens == 31 * PAGE
    assert len(await holders(fleet)) > 0


@pytest.mark.parametrize("tags", [b"", b"odd", b"none" * 3, b"x" * 4 * MAX_HOLDERS + b"more"], ids=repr)
async def test_malformed_holder_lists_are_ignored(fleet, tags):
    for number in range(SIZE):
        record = make_record(f"w{number}")
        await fleet.beat(record)
        await fleet.cache(record, CHAIN)
    for digest in await holders(fleet):
        await fleet.client.command("HSET", f"{fleet.keys.prefix}holders:{digest.hex()[:3]}", digest, tags)
    routed = await route(fleet)
    assert routed is not None
    assert routed.matched_tokens == len(CHAIN) * PAGE  # by their sets, of the least loaded worker


async def test_tag_that_names_another_worker_is_not_believed(server, fleet):
    for number in range(SIZE):
        await fleet.beat(make_record(f"w{number}", load=make_load(queue_tokens=100)))
    await fleet.cache(make_record("w41"), CHAIN)
    tags = fleet.keys.prefix + "tags"
    names = await fleet.client.command("HGETALL", tags)
    assert isinstance(names, dict)
    for tag in names:
        await fleet.client.command("HSET", tags, tag, "nobody@1")
    async with second_library(server, SWEEP_STEP=62) as reader:  # it has resolved no tag yet
        assert await route(reader) is not None


async def test_worker_without_ranks_is_found_after_a_sweep(server, fleet):
    """As one of a release without ranks and index by block, whose heartbeats write its row alone."""
    records = [make_record(f"w{number}") for number in range(SIZE)]
    for record in records:
        await fleet.beat(record)
    await fleet.cache(make_record("w41"), CHAIN)
    for key in ("tags", "kinds:*", "least:*", "holders:*"):
        found = await fleet.client.command("KEYS", fleet.keys.prefix + key)
        assert isinstance(found, list)
        await fleet.client.command("DEL", *found)
    await fleet.client.command("HDEL", fleet.keys.prefix + "meta", "ranked_at", "unpublished")
    async with second_library(server, SWEEP_STEP=61) as reader:
        routed = await route(reader)
        assert routed is not None
        assert (routed.prefill or routed.decode, routed.matched_tokens) == ("w41@1", len(CHAIN) * PAGE)
        assert await fleet.client.command("HGET", fleet.keys.prefix + "meta", "unpublished") == b"60"


async def test_lost_ranks_are_written_by_the_next_decision(fleet):
    for number in range(SIZE):
        await fleet.beat(make_record(f"w{number}"))
    found = await fleet.client.command("KEYS", fleet.keys.prefix + "least:*")
    assert isinstance(found, list)
    await fleet.client.command("DEL", *found)
    await fleet.client.command("HSET", fleet.keys.prefix + "meta", "ranked_at", 0)
    assert await route(fleet) is not None
    assert len(await ranked(fleet, "decode")) == SIZE


async def test_lists_of_holders_are_bounded(fleet):
    for number in range(2 * MAX_HOLDERS):
        record = make_record(f"w{number}")
        await fleet.beat(record)
        await fleet.cache(record, CHAIN)
    lists = (await holders(fleet)).values()
    assert {len(tags) for tags in lists} == {MAX_HOLDERS}
    assert all(len(set(tags)) == len(tags) for tags in lists)


async def test_removed_blocks_have_no_holder(fleet):
    record = make_record("w")
    await fleet.beat(record)
    for updates in ([IndexUpdate(UpdateKind.CLEARED), IndexUpdate(UpdateKind.STORED, tuple(CHAIN + OTHER))],):
        await fleet.index.apply("w@1", updates, page_size=PAGE, builds_on=-1, revision=1)
    gone = [IndexUpdate(UpdateKind.REMOVED, tuple(CHAIN))]
    await fleet.index.apply("w@1", gone, page_size=PAGE, builds_on=1, revision=2)
    assert set(await holders(fleet)) < set(OTHER)
    assert await holders(fleet)


async def test_blocks_that_are_named_again_have_their_holders_back(fleet):
    record = make_record("w")
    await fleet.beat(record)
    await fleet.cache(record, CHAIN)
    before = await holders(fleet)
    cursor = await fleet.client.command("GET", fleet.keys.cursor("w@1"))
    assert isinstance(cursor, bytes)
    for digest in before:
        await fleet.client.command("DEL", f"{fleet.keys.prefix}holders:{digest.hex()[:3]}")
    again = [IndexUpdate(UpdateKind.NAMED_AGAIN, tuple(CHAIN))]
    await fleet.index.apply("w@1", again, page_size=PAGE, builds_on=int(cursor), revision=int(cursor) + 1)
    assert await holders(fleet) == before


@pytest.mark.parametrize("ending", ["restart", "cleared"])
async def test_sweep_removes_stale_holders_of_a_worker(server, ending):
    async with Fleet.of(server, **LASTING_SWEEPS) as workers:
        record = make_record("w")
        await workers.beat(record)
        await workers.cache(record, CHAIN)
        assert await holders(workers)
        if ending == "restart":
            await workers.beat(make_record("w", number=2))
        else:
            await workers.cache(record, OTHER)
        await workers.beat(make_record("another"))
        assert set(await holders(workers)) <= set(OTHER)


@pytest.mark.parametrize("lost", [False, True], ids=["known", "lost"])
async def test_decision_drops_holders_that_are_gone(fleet, lost):
    """After a rollout of all workers, of which one has the prompt again. Not where Redis has lost the names of all."""
    for number in range(SIZE):
        await fleet.beat(make_record(f"w{number}"))
        await fleet.cache(make_record(f"w{number}"), CHAIN)
    for number in range(SIZE):
        await fleet.beat(make_record(f"w{number}", number=2))
    await fleet.cache(make_record("w7", number=2), CHAIN)
    before = await holders(fleet)
    if lost:
        await fleet.client.command("DEL", fleet.keys.prefix + "tags")
    for seed in range(3):
        routed = await route(fleet, seed=seed)
        assert routed is not None
        assert lost or routed.matched_tokens == len(CHAIN) * PAGE
        await fleet.index.release(routed.reservation)
    after = await holders(fleet)
    changed = {digest for digest, tags in before.items() if after.get(digest) != tags}
    assert all(len(after[digest]) == 1 for digest in changed)
    assert len(changed) == 0 if lost else len(changed) > 0


async def test_restarted_worker_has_no_match_of_before(fleet):
    for number in range(SIZE):
        await fleet.beat(make_record(f"w{number}", load=make_load(queue_tokens=100)))
    await fleet.cache(make_record("w41"), CHAIN)
    await fleet.beat(make_record("w41", number=2))
    routed = await route(fleet)
    assert routed is not None
    assert routed.matched_tokens == 0


def score_of(record: WorkerRecord, role: Role) -> float:
    load = record.load
    if role is Role.PREFILL:
        waiting = {Role.PREFILL: FOLLOWERS, Role.BOTH: load.sequences + FOLLOWERS}[record.view.role]
        moving_s = 1e5 / load.transfer_rate if record.view.role is Role.PREFILL else 0.0
        return load.queue_tokens / load.prefill_rate + RANKED_TOKENS * ((1 + waiting) / load.prefill_rate + moving_s)
    no_room = load.sequences >= load.max_sequences or load.room_tokens < 8192
    return load.sequences * load.step_s + (5.0 if no_room else 0.0)


@pytest.mark.parametrize("seed", range(4))
async def test_ranks_and_rows_agree_after_a_heartbeat_of_each(server, seed):
    """Whatever two libraries, and others, have done before."""
    random = Random(seed)
    async with Fleet.of(server, **LASTING) as one, second_library(server, SWEEP_STEP=63) as other:
        records: dict[str, WorkerRecord] = {}
        reservations = []
        for _ in range(300):
            library, name = random.choice([one, other]), f"w{random.randrange(40)}"
            match random.choice(["beat"] * 4 + ["route"] * 4 + ["release", "cache", "fence", "flush", "evict"]):
                case "beat":
                    record = make_record(name, random.choice([*Role]), load=drawn_load(random))
                    if (await library.beat(record)).status is LeaseStatus.RENEWED:
                        records[name] = record
                case "cache" if name in records:
                    await library.cache(records[name], CHAIN[: random.randrange(len(CHAIN))])
                case "route":
                    routed = await route(library, seed=random.getrandbits(31))
                    reservations += [] if routed is None else [routed.reservation]
                case "release" if reservations:
                    await library.index.release(reservations.pop())
                case "fence":
                    await library.registry.deregister(f"{name}@1")
                    records.pop(name, None)
                case "flush" if random.random() < 0.1:
                    server.command("FLUSHALL")
                case "evict":
                    key = await one.client.command("RANDOMKEY")
                    if isinstance(key, bytes):
                        await one.client.command("DEL", key)
                case _:
                    pass
        server.command("DEL", one.keys.prefix + "fleet")  # with all reservations
        for name in [*records]:
            if (await one.beat(records[name])).status is not LeaseStatus.RENEWED:
                records.pop(name)
        for role in (Role.PREFILL, Role.DECODE):
            offered = {name: record for name, record in records.items() if record.view.role in {role, Role.BOTH}}
            routed = await route(one)
            if routed is not None:
                await one.index.release(routed.reservation)
            await check_rank(one, role, offered)


async def check_rank(fleet: Fleet, role: Role, offered: dict[str, WorkerRecord]) -> None:
    """The rank has these workers, each with its load; others in it have no row, or one of another role."""
    keys = await fleet.client.command("KEYS", f"{fleet.keys.prefix}least:*:{role.value}")
    assert isinstance(keys, list)
    for name, record in offered.items():
        score = await fleet.client.command("ZSCORE", keys[0], f"{name}@1")
        assert isinstance(score, float), name
        assert score == pytest.approx(score_of(record, role), abs=2e-4)


async def commands_of_a_decision(server: RedisServer, workers: int) -> float:
    async with Fleet.of(server, **LASTING) as fleet:
        random = Random(1)
        for number in range(workers):
            record = make_record(f"w{number}", random.choice([Role.PREFILL, Role.DECODE]), load=drawn_load(random))
            await fleet.beat(record)
            await fleet.cache(record, CHAIN[: random.randrange(len(CHAIN))])
        server.command("CONFIG", "RESETSTAT")
        for seed in range(40):
            assert await route(fleet, seed=seed) is not None
        lines = server.command("INFO", "commandstats").splitlines()
        return sum(int(line.partition("calls=")[2].partition(",")[0]) for line in lines if "calls=" in line) / 40


def calls_of(server: RedisServer, command: str) -> int:
    lines = server.command("INFO", "commandstats").splitlines()
    line = next(line for line in lines if line.startswith(f"cmdstat_{command}:"))
    return int(line.partition("calls=")[2].partition(",")[0])


async def test_decision_reads_do_not_grow_with_fleet_size(server):
    assert await commands_of_a_decision(server, 240) <= 1.25 * await commands_of_a_decision(server, 60)


async def test_kinds_without_described_workers_are_dropped(server):
    async with Fleet.of(server, **{**LASTING, "DESCRIBED_TTL_MS": -1}) as workers:
        for compat in ("old", "new"):
            await workers.beat(make_record(f"w-{compat}", compat_hash=compat))
        keys = await workers.client.command("KEYS", workers.keys.prefix + "kinds:*")
        assert isinstance(keys, list)
        assert await workers.client.command("ZCARD", keys[0]) == 1


async def test_row_under_a_name_that_is_no_incarnation_is_no_worker(fleet):
    for number in range(SIZE):
        await fleet.beat(make_record(f"w{number}", load=make_load(queue_tokens=100)))
    row = await fleet.client.command("HGET", fleet.keys.prefix + "fleet", "w1@1")
    assert isinstance(row, bytes)
    await fleet.client.command("HSET", fleet.keys.prefix + "fleet", "nobody", row)
    for key in await names_of(fleet, "least:*"):
        await fleet.client.command("ZADD", key, -1, "nobody")
    for seed in range(4):
        routed = await route(fleet, seed=seed)
        assert routed is not None
        assert "nobody" not in {routed.decode, routed.prefill}
    assert "nobody" not in await ranked(fleet, "decode")


async def names_of(fleet: Fleet, pattern: str) -> list[bytes]:
    keys = await fleet.client.command("KEYS", fleet.keys.prefix + pattern)
    assert isinstance(keys, list)
    return [key for key in keys if isinstance(key, bytes)]


async def test_kinds_of_the_future_do_not_hide_workers(fleet):
    for number in range(SIZE):
        await fleet.beat(make_record(f"w{number}"))
    kinds = (await names_of(fleet, "kinds:*"))[0]
    for number in range(64):
        await fleet.client.command("ZADD", kinds, "inf", f"{number:016}")
    await fleet.beat(make_record("w0"))
    assert await fleet.client.command("ZCARD", kinds) == 1
    assert await route(fleet) is not None


async def test_rank_with_more_names_than_workers_is_written_again(server, fleet):
    async with second_library(server, MAX_WORKERS=SIZE + 10) as workers:
        for number in range(SIZE):
            await workers.beat(make_record(f"w{number}"))
        for key in await names_of(fleet, "least:*"):
            for number in range(1000):
                await workers.client.command("ZADD", key, -1, f"nobody-{number}@1")
        server.command("CONFIG", "RESETSTAT")
        assert await route(workers) is not None
        assert calls_of(server, "hget") < 1000
        assert len(await ranked(workers, "decode")) == SIZE


async def test_worker_with_the_adapter_is_found_in_a_large_fleet(fleet):
    for number in range(SIZE):
        await fleet.beat(make_record(f"w{number}", load=make_load(queue_tokens=500 if number == 41 else 0)))
    absences = {f"w{number}@1": Absence(5.0, 0.0) for number in range(SIZE) if number != 41}
    routed = await route(fleet, absences=absences)
    assert routed is not None
    assert (routed.prefill, routed.decode) == (None, "w41@1")


async def test_model_without_workers_does_not_rank_others(fleet):
    for number in range(SIZE):
        await fleet.beat(make_record(f"w{number}"))
    await fleet.client.command("DEL", *await names_of(fleet, "least:*"))
    missing = {"demand": DEMAND, "page_size": PAGE, "exclude": frozenset[str](), "chain": b"".join(CHAIN), "seed": 1}
    assert await fleet.index.route(model="nobody's", **missing) is None
    assert await names_of(fleet, "least:*") == []
    await fleet.client.command("HDEL", fleet.keys.prefix + "meta", "missed_at")
    assert await route(fleet) is not None


async def test_older_workers_do_not_make_decisions_read_all(server, fleet):
    for number in range(SIZE):
        await fleet.beat(make_record(f"w{number}", [Role.PREFILL, Role.DECODE][number % 2]))
    await fleet.client.command("HSET", fleet.keys.prefix + "meta", "unpublished", 1)
    async with second_library(server, MIXED_UP_TO=SIZE // 4) as workers:
        assert await route(workers) is not None
        server.command("CONFIG", "RESETSTAT")
        assert await route(workers, seed=2) is not None
        assert SIZE // 4 <= calls_of(server, "hget") < SIZE


async def test_tags_of_another_type_fail_no_heartbeat(server):
    async with Fleet.of(server, **LASTING_SWEEPS) as workers:
        await workers.beat(make_record("w"))
        await workers.client.command("DEL", workers.keys.prefix + "tags")
        await workers.client.command("SET", workers.keys.prefix + "tags", "x")
        await workers.beat(make_record("w"), describe=False)
