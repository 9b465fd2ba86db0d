"""The prefix index against a real Redis: order, gaps, repeats, malformed data, and its cost."""

from random import Random

import pytest

from tandem_services.router.cost import Demand
from tandem_services.router.index import Applied, IndexUpdate, UpdateKind
from tandem_testing.redis_server import RedisServer
from tandem_testing.router_builders import LASTING, MODEL, PAGE, Fleet, chain_of, make_load, make_record

PROMPT = tuple(range(10 * PAGE + 5))
CHAIN = chain_of(PROMPT)
CLEARED = IndexUpdate(UpdateKind.CLEARED)


@pytest.fixture
async def fleet(server):
    async with Fleet.of(server, **LASTING) as workers:
        await workers.beat(make_record("w1"))
        yield workers


def stored(*hashes: bytes) -> IndexUpdate:
    return IndexUpdate(UpdateKind.STORED, hashes)


def removed(*hashes: bytes) -> IndexUpdate:
    return IndexUpdate(UpdateKind.REMOVED, hashes)


async def apply(fleet: Fleet, *updates: IndexUpdate, builds_on: int, revision: int) -> Applied:
    return await fleet.index.apply("w1@1", updates, page_size=PAGE, builds_on=builds_on, revision=revision)


async def matched(fleet: Fleet, chain: list[bytes] = CHAIN, *, page: int = PAGE) -> int:
    demand = Demand(prompt_tokens=len(PROMPT), output_tokens=1, local_prefill_tokens=16)
    routed = await fleet.index.route(
        model=MODEL, demand=demand, page_size=page, chain=b"".join(chain), exclude=frozenset(), seed=1
    )
    assert routed is not None
    return routed.matched_tokens


@pytest.mark.parametrize("held", [0, 1, 2, 3, 7, 9, 10])
async def test_longest_cached_prefix_is_found(fleet, held):
    await apply(fleet, CLEARED, stored(*CHAIN[:held]), builds_on=-1, revision=1)
    assert await matched(fleet) == held * PAGE


async def test_events_apply_in_order(fleet):
    await apply(fleet, CLEARED, stored(*CHAIN), builds_on=-1, revision=1)
    await apply(fleet, removed(*CHAIN[4:]), stored(CHAIN[4]), builds_on=1, revision=2)
    assert await matched(fleet) == 5 * PAGE


async def test_long_event_is_applied_whole(fleet):
    foreign = [bytes([i % 256, i // 256]) + bytes(14) for i in range(2500)]
    await apply(fleet, CLEARED, stored(*foreign, *CHAIN), builds_on=-1, revision=1)
    assert await matched(fleet) == 10 * PAGE


async def test_update_that_does_not_fit_is_a_gap_and_changes_nothing(fleet):
    await apply(fleet, CLEARED, stored(*CHAIN[:2]), builds_on=-1, revision=1)
    assert await apply(fleet, stored(*CHAIN[2:]), builds_on=2, revision=3) is Applied.GAP
    assert await matched(fleet) == 2 * PAGE


async def test_repeating_an_update_after_a_lost_answer_is_harmless(fleet):
    await apply(fleet, CLEARED, builds_on=-1, revision=1)
    update = (stored(*CHAIN[:3]), removed(CHAIN[2]))
    assert await apply(fleet, *update, builds_on=1, revision=2) is Applied.APPLIED
    assert await apply(fleet, *update, builds_on=1, revision=2) is Applied.REPEATED
    assert await matched(fleet) == 2 * PAGE


async def test_update_after_a_wipe_is_a_gap(server, fleet):
    await apply(fleet, CLEARED, stored(*CHAIN[:2]), builds_on=-1, revision=1)
    server.wipe()
    assert await apply(fleet, stored(CHAIN[2]), builds_on=1, revision=2) is Applied.GAP


async def test_heartbeat_returns_index_cursor(server, fleet):
    assert (await fleet.beat(make_record("w1"))).cursor == -1
    await apply(fleet, CLEARED, builds_on=-1, revision=41)
    assert (await fleet.beat(make_record("w1"))).cursor == 41
    server.command("DEL", fleet.keys.cursor("w1@1"))
    assert (await fleet.beat(make_record("w1"))).cursor == -1


async def test_entries_of_an_earlier_incarnation_never_count(fleet):  # [redis-values-untrusted]
    await apply(fleet, CLEARED, stored(*CHAIN), builds_on=-1, revision=1)
    await fleet.beat(make_record("w1", number=2))
    assert await matched(fleet) == 0


async def test_worker_with_another_page_size_matches_nothing(fleet):
    await fleet.beat(make_record("w1", page_size=32))
    await apply(fleet, CLEARED, stored(*CHAIN), builds_on=-1, revision=1)
    assert await matched(fleet) == 0


async def test_use_of_an_index_extends_its_life(server, fleet):
    await apply(fleet, CLEARED, stored(*CHAIN), builds_on=-1, revision=1)
    for key in (fleet.keys.blocks("w1@1"), fleet.keys.cursor("w1@1")):
        server.command("PEXPIRE", key, "5000")
    await fleet.beat(make_record("w1"))
    for key in (fleet.keys.blocks("w1@1"), fleet.keys.cursor("w1@1")):
        assert int(server.command("PTTL", key).strip()[1:]) > 50_000


async def test_bigger_match_beats_an_equal_worker(fleet):
    await fleet.beat(make_record("w2", load=make_load()))
    await apply(fleet, CLEARED, stored(*CHAIN[:6]), builds_on=-1, revision=1)
    assert await matched(fleet) == 6 * PAGE


@pytest.mark.parametrize("key", ["fleet", "owner", "fenced", "meta", "worker:w1", "blocks:w1@1", "cursor:w1@1"])
@pytest.mark.parametrize("malformed", [("RPUSH", "x", "y"), ("SET", "x" * 100_000), ("HSET", "w1@1", "malformed")])
async def test_key_of_the_wrong_type_or_content_is_a_miss_and_heals(  # [redis-values-untrusted]
    server, fleet, key, malformed
):
    await apply(fleet, CLEARED, stored(*CHAIN), builds_on=-1, revision=1)
    name = fleet.keys.prefix + key
    server.command("DEL", name)
    server.command(malformed[0], name, *malformed[1:])
    demand = Demand(prompt_tokens=len(PROMPT), output_tokens=1, local_prefill_tokens=16)
    await fleet.index.route(
        model=MODEL, demand=demand, page_size=PAGE, chain=b"".join(CHAIN), exclude=frozenset(), seed=1
    )
    await fleet.snapshot()
    reply = await fleet.beat(make_record("w1"))
    assert reply.status == "renewed"
    if reply.cursor == -1:
        await apply(fleet, CLEARED, stored(*CHAIN), builds_on=-1, revision=2)
    assert await matched(fleet) == 10 * PAGE
    (seen,) = (await fleet.snapshot()).workers
    assert seen == make_record("w1")


@pytest.mark.parametrize("row", ["", "x" * 106, "x" * 107, "\x7f" * 106, "x" * 1_000_000])
async def test_malformed_registry_row_is_unused_and_swept(server, fleet, row):
    server.command("HSET", fleet.keys.prefix + "fleet", "evil@1", row)
    assert await matched(fleet) == 0
    server.command("HSET", fleet.keys.prefix + "meta", "swept_at", "0")
    assert (await fleet.snapshot()).malformed == 1
    assert server.command("HEXISTS", fleet.keys.prefix + "fleet", "evil@1") == ":0\r\n"


async def test_index_with_malformed_blocks_only_misestimates_the_match(server, fleet):
    await apply(fleet, CLEARED, stored(CHAIN[0], CHAIN[9], b"short", bytes(40)), builds_on=-1, revision=1)
    assert 0 <= await matched(fleet) <= 10 * PAGE


async def test_index_takes_what_is_written_of_a_million_blocks(server, fleet):
    """docs/routing.md: 69 bytes of a set and 8 of the index by block, which has as many for each of its hashes here."""
    random, count = Random(1), 62_500
    digests = [bytes([random.randrange(16)]) + random.randbytes(15) for _ in range(count)]
    await apply(fleet, CLEARED, builds_on=-1, revision=1)
    before = used_memory(server)
    for number, first in enumerate(range(0, count, 2500), start=1):
        await apply(fleet, stored(*digests[first : first + 2500]), builds_on=number, revision=number + 1)
    assert (used_memory(server) - before) / count <= 1.2 * (69 + 8)
    assert server.command("OBJECT", "ENCODING", f"{fleet.keys.prefix}holders:000").split()[-1] == "listpack"


def used_memory(server: RedisServer) -> int:
    lines = server.command("INFO", "memory").splitlines()
    return next(int(line.partition(":")[2]) for line in lines if line.startswith("used_memory:"))
