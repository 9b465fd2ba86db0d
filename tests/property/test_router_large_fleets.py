"""In a large fleet Redis looks closely at few workers, and chooses as if it had looked at all (scripts/settle.lua)."""

import re
from dataclasses import replace
from random import Random

import pytest

from tandem_engine.config import Role
from tandem_engine.messages.stats import LinkReport
from tandem_services.router.cost import Candidate, Demand, Load
from tandem_services.router.in_flight import named_blocks, named_step
from tandem_services.router.keys import DIGEST_BYTES, MAX_NAMED_BLOCKS
from tandem_services.router.registry import WorkerRecord
from tandem_services.router.scoring import select
from tandem_testing.redis_server import REDIS_SERVER, RedisServer
from tandem_testing.router_builders import LASTING, MODEL, PAGE, Fleet, chain_of, make_load, make_record

pytestmark = pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")

PROMPT = tuple(range(1000))
CHAIN = chain_of(PROMPT)
ROLES = ([Role.BOTH], [Role.PREFILL, Role.DECODE], [Role.DECODE], [*Role])


@pytest.fixture(scope="module")
def server():
    process = RedisServer.start()
    yield process
    process.stop()


def drawn_load(random: Random) -> Load:
    """No two are equal, so that nothing is left to chance."""
    return Load(
        queue_tokens=random.uniform(0.0, random.choice([1.0, 5000.0])),
        prefill_rate=random.uniform(500.0, random.choice([600.0, 20_000.0])),
        sequences=random.randrange(70),
        step_s=random.uniform(0.001, 0.05),
        room_tokens=random.choice([0.0, 1e5, 1e5]),
        max_sequences=64,
        token_bytes=random.choice([1e3, 1e5]),
        transfer_rate=random.uniform(1e8, 1e10),
        host_token_s=random.choice([0.0, 0.0, random.uniform(1e-6, 1e-3)]),
    )


def drawn_host_part(random: Random, blocks: int) -> int:
    """How many of a worker's blocks are in host memory alone."""
    return random.choice([0, 0, random.randint(0, blocks)])


def drawn_fleet(random: Random) -> list[tuple[WorkerRecord, int, int]]:
    """Workers, how many blocks of the prompt each has (a few the same, or each another share, or most of it), and how
    many of these are in host memory alone."""
    count, roles = random.randrange(5, 25), random.choice(ROLES)
    least = random.choice([0, 0, 40])
    shares = random.sample(range(least, len(CHAIN) + 1), min(count, len(CHAIN) + 1 - least)) + [0] * count
    cached = random.choice([count, count, 6])
    fleet = []
    for number in range(count):
        peers = random.sample(range(count), 4)
        links = tuple(LinkReport(peer=f"w{peer}@1", bytes_per_s=random.uniform(1e6, 1e10)) for peer in peers)
        record = make_record(f"w{number}", random.choice(roles), load=drawn_load(random), links=links)
        blocks = shares[number] if number < cached else 0
        fleet.append((record, blocks, drawn_host_part(random, blocks)))
    return fleet


@pytest.mark.parametrize("seeds", [range(first, first + 40) for first in (0, 40)], ids=str)
async def test_redis_choice_equals_exhaustive_choice(server, seeds):
    for seed in seeds:
        random = Random(seed)
        fleet = drawn_fleet(random)
        demand = Demand(prompt_tokens=len(PROMPT), output_tokens=64, local_prefill_tokens=random.choice([16, 300]))
        server.command("FLUSHALL")
        async with Fleet.of(server, **LASTING) as workers:
            for record, blocks, in_host in fleet:
                await workers.beat(record)
                await workers.cache(record, CHAIN[:blocks], in_host=in_host)
            routed = await workers.index.route(
                model=MODEL, demand=demand, page_size=PAGE, chain=b"".join(CHAIN), exclude=frozenset(), seed=seed
            )
        candidates = [
            Candidate(
                view=record.view,
                load=record.load,
                matched=blocks * PAGE,
                in_host=in_host * PAGE,
                links=record.link_rates,
            )
            for record, blocks, in_host in fleet
        ]
        option = select(candidates, demand, Random(seed))
        assert (routed is None) is (option is None)
        if routed is None or option is None:
            continue
        assert sum(term.seconds for term in routed.terms) == pytest.approx(option.cost, abs=2e-4), f"seed {seed}"
        known = {record.view.incarnation: blocks * PAGE for record, blocks, _ in fleet}
        assert routed.matched_tokens == known[routed.prefill or routed.decode]


@pytest.mark.parametrize("blocks", [0, 1, MAX_NAMED_BLOCKS, MAX_NAMED_BLOCKS + 1, 700, 5 * MAX_NAMED_BLOCKS])
def test_long_prompt_names_evenly_spaced_blocks_and_its_last(blocks):
    chain = [number.to_bytes(DIGEST_BYTES, "big") for number in range(1, blocks + 1)]
    named = named_blocks(b"".join(chain))
    numbers = [int.from_bytes(named[i : i + DIGEST_BYTES], "big") for i in range(0, len(named), DIGEST_BYTES)]
    step = named_step(blocks)
    assert numbers == [number for number in range(1, blocks + 1) if number % step == 0 or number == blocks]
    assert len(numbers) <= MAX_NAMED_BLOCKS
    assert step == 1 or len(numbers) > MAX_NAMED_BLOCKS // 2


def test_prompts_of_two_lengths_name_the_same_blocks_of_a_prefix():
    chain = [number.to_bytes(DIGEST_BYTES, "big") for number in range(1, 6300)]
    for longer in (6200, 6201, 6298):
        first, second = (named_blocks(b"".join(chain[:blocks])) for blocks in (6199, longer))
        assert first[:-DIGEST_BYTES] == second[: len(first) - DIGEST_BYTES]


@pytest.mark.parametrize("held", [0, 1, 3, 17, 350, 699, 700])
async def test_long_prompt_match_is_rounded_to_sampled_block(server, held):
    prompt = tuple(range(700 * PAGE + 5))
    chain = chain_of(prompt)
    server.command("FLUSHALL")
    async with Fleet.of(server, **LASTING) as workers:
        for name, blocks in (("other", 500), ("w", held)):
            record = make_record(name, load=make_load(), context_length=1 << 20)
            await workers.beat(record)
            await workers.cache(record, chain[:blocks])
        routed = await workers.index.route(
            model=MODEL,
            demand=Demand(prompt_tokens=len(prompt), output_tokens=16, local_prefill_tokens=2048),
            page_size=PAGE,
            chain=b"".join(chain),
            exclude=frozenset({"other@1"}),
            seed=1,
        )
    named = [*range(0, 700, named_step(700)), 700]
    assert routed.matched_tokens == max(block for block in named if block <= held) * PAGE


LONG_PROMPT = tuple(range(MAX_NAMED_BLOCKS * 5 // 2 * PAGE))
LONG_CHAIN = chain_of(LONG_PROMPT)
NAMED = [*range(0, len(LONG_CHAIN), named_step(len(LONG_CHAIN))), len(LONG_CHAIN)]


def ragged_fleet(random: Random) -> list[tuple[WorkerRecord, int]]:
    """64 workers, half of them for prefill, and how many blocks of the long prompt each has: every one of them another
    share, as far as the index tells."""
    shares = random.sample(NAMED, 64)
    fleet = []
    for number, blocks in enumerate(shares):
        links = tuple(
            LinkReport(peer=f"w{peer}@1", bytes_per_s=random.uniform(1e8, 1e10)) for peer in random.sample(range(64), 8)
        )
        role = Role.PREFILL if number % 2 else Role.DECODE
        load = replace(drawn_load(random), host_token_s=0.0)
        fleet.append((make_record(f"w{number}", role, load=load, links=links, context_length=1 << 20), blocks))
    return fleet


def sismember_calls(server: RedisServer) -> int:
    reported = re.search(r"cmdstat_sismember:calls=(\d+)", server.command("INFO", "commandstats"))
    return int(reported[1]) if reported else 0


async def test_redis_chooses_among_64_workers_as_the_formula(server):
    demand = Demand(prompt_tokens=len(LONG_PROMPT), output_tokens=64, local_prefill_tokens=16)
    looks, decisions = 0, 0
    for number in range(3):
        random = Random(number)
        fleet = ragged_fleet(random)
        candidates = [
            Candidate(view=record.view, load=record.load, matched=blocks * PAGE, links=record.link_rates)
            for record, blocks in fleet
        ]
        option = select(candidates, demand, random)
        assert option is not None
        async with Fleet.of(server, LEASE_MS=600_000, ALL_UP_TO=64) as workers:
            for record, blocks in fleet:
                await workers.beat(record)
                await workers.cache(record, LONG_CHAIN[:blocks])
            server.command("CONFIG", "RESETSTAT")
            for seed in range(24):  # from which worker on they are looked at follows from it
                routed = await workers.index.route(
                    model=MODEL,
                    demand=demand,
                    page_size=PAGE,
                    chain=b"".join(LONG_CHAIN),
                    exclude=frozenset(),
                    seed=seed,
                )
                assert routed is not None
                await workers.index.release(routed.reservation)
                predicted = sum(term.seconds for term in routed.terms)
                assert predicted == pytest.approx(option.cost, abs=2e-4), f"fleet {number}, seed {seed}"
        looks, decisions = looks + sismember_calls(server), decisions + 24
    assert looks / decisions < 260  # halving for all workers takes 448


async def test_fourth_longest_match_is_a_source_for_any_seed(server):
    """It is the only one with a fast link."""
    shares = [50, 55, 60, 62, *range(1, 36)]
    async with Fleet.of(server, LEASE_MS=600_000) as workers:
        await workers.beat(make_record("computing", load=make_load(queue_tokens=10)))
        for number, blocks in enumerate(shares):
            link = LinkReport(peer="computing@1", bytes_per_s=1e2 if number else 1e12)
            record = make_record(f"w{number}", load=make_load(queue_tokens=1e6), links=(link,))
            await workers.beat(record)
            await workers.cache(record, CHAIN[:blocks])
        for seed in range(40):  # from which worker on they are looked at follows from it
            routed = await workers.index.route(
                model=MODEL,
                demand=Demand(prompt_tokens=len(PROMPT), output_tokens=16, local_prefill_tokens=16),
                page_size=PAGE,
                chain=b"".join(CHAIN),
                exclude=frozenset(),
                seed=seed,
            )
            assert routed is not None
            assert routed.fetch is not None
            assert (routed.decode, routed.fetch.source) == ("computing@1", "w0@1"), f"seed {seed}"
            await workers.index.release(routed.reservation)
