"""Prompts in flight count as cached: in the notes that Redis keeps, and in those of a gateway without Redis."""

import asyncio
from collections import Counter
from functools import partial
from random import Random

import pytest

from tandem_engine.config import Role
from tandem_services.router.cost import Candidate, Demand
from tandem_services.router.decision import Choice, Source
from tandem_services.router.index import IndexUpdate, UpdateKind
from tandem_services.router.scoring import has_to_wait, select
from tandem_testing.redis_server import RedisServer
from tandem_testing.router_builders import (
    LASTING,
    MODEL,
    PAGE,
    Fleet,
    chain_of,
    make_load,
    make_query,
    make_record,
    patient_router,
)

PROMPT = tuple(range(40 * PAGE))
CHAIN = chain_of(PROMPT)
DEMAND = Demand(prompt_tokens=len(PROMPT), output_tokens=16, local_prefill_tokens=2048)
WORKERS = tuple(make_record(f"w{number}") for number in range(4))

query = partial(make_query, token_ids=PROMPT)


def computing(choice: Choice) -> str:
    """Who computes the prompt; among workers that do both another one may decode."""
    return (choice.prefill or choice.decode).worker_id


async def test_equal_prompts_in_flight_meet_on_one_worker(fleet, router):
    await fleet.join(router, *WORKERS)
    choices = [await router.choose(query()) for _ in range(4)]
    assert len({computing(choice) for choice in choices}) == 1
    assert [choice.matched_tokens for choice in choices] == [0] + 3 * [len(PROMPT)]


async def test_prompts_of_two_gateways_in_flight_meet(fleet, router, server):
    other = patient_router(server, seed=2)
    await other.start()
    try:
        await fleet.join(router, *WORKERS)
        await other.refresh()
        first, second = await router.choose(query()), await other.choose(query())
        assert computing(first) == computing(second)
        assert second.matched_tokens == len(PROMPT)
    finally:
        await other.stop()


@pytest.mark.parametrize("pages", [(100, 101), (101, 100), (300, 301), (301, 300), (300, 700), (700, 300)], ids=str)
async def test_common_prefix_of_other_length_counts_in_flight(fleet, router, pages):
    """Longer prompts name every 2nd, 4th, 8th … block, and each 4th of these has a note: 32 blocks apart."""
    records = [make_record(f"w{number}", context_length=1 << 20) for number in range(4)]
    await fleet.join(router, *records)
    shared = tuple(range(80 * PAGE))
    rests = (range(start, start + (each - 80) * PAGE) for start, each in zip((10**5, 10**6), pages, strict=True))
    first_prompt, second_prompt = (shared + tuple(rest) for rest in rests)
    first = await router.choose(query(token_ids=first_prompt))
    for record in records:  # newer reports, so that nothing but the note tells them apart
        await fleet.beat(record, report_age_s=-1.0)
    second = await router.choose(query(token_ids=second_prompt))
    assert (computing(first), first.matched_tokens) == (computing(second), 0)
    assert 64 * PAGE <= second.matched_tokens <= 80 * PAGE


async def test_other_prompt_in_flight_matches_nothing(fleet, router):
    await fleet.join(router, *WORKERS)
    await router.choose(query(cache_salt="a"))
    assert (await router.choose(query(cache_salt="b"))).matched_tokens == 0
    assert (await router.choose(query(token_ids=tuple(range(9000, 9100))))).matched_tokens == 0


async def test_released_prompt_is_not_in_flight(fleet, router):
    await fleet.join(router, *WORKERS)
    first = await router.choose(query())
    await router.release(first)
    assert (await router.choose(query())).matched_tokens == 0


async def test_second_release_takes_back_no_other_note(fleet, router):
    await fleet.join(router, *WORKERS)
    first = await router.choose(query())
    await router.release(first)
    await router.choose(query())
    await fleet.index.release(first.reservation)
    assert (await router.choose(query())).matched_tokens == len(PROMPT)


async def test_polls_without_room_leave_neither_notes_nor_load(fleet, router):
    """A queue asks again and again while workers are full."""
    await fleet.join(router, *(make_record(f"w{number}", load=make_load(room_tokens=10)) for number in range(4)))
    firsts = []
    for _ in range(3):
        choices = [await router.choose(query()) for _ in range(50)]
        assert all(has_to_wait(choice.terms) for choice in choices)
        firsts.append(choices[0])
        for choice in choices:
            router.release_soon(choice)
        await asyncio.sleep(0)  # they go back together, before the next query
    assert [choice.matched_tokens for choice in firsts] == [0, 0, 0]
    assert len({choice.terms for choice in firsts}) == 1


async def test_hot_prompt_in_flight_is_spread_over_workers(fleet, router):
    """It is computed once or a few times, and generated everywhere."""
    await fleet.join(router, *WORKERS)
    decoding = Counter([(await router.choose(query())).decode.worker_id for _ in range(200)])
    assert len(decoding) == len(WORKERS)
    assert max(decoding.values()) <= 2 * 200 / len(WORKERS), decoding


async def test_wiped_registry_forgets_prompts_in_flight(fleet, router, server):
    await fleet.join(router, *WORKERS)
    await router.choose(query())
    server.command("FLUSHALL")
    await fleet.join(router, *WORKERS)
    assert (await router.choose(query())).matched_tokens == 0


async def test_removed_block_is_not_in_flight(fleet, router):
    record = make_record("w")
    await fleet.join(router, record)
    await router.choose(query())
    await fleet.cache(record, CHAIN)
    gone = IndexUpdate(UpdateKind.REMOVED, tuple(CHAIN))
    revision = abs(hash((*CHAIN, 0))) % (1 << 40) + 1
    await fleet.index.apply(record.view.incarnation, [gone], page_size=16, builds_on=revision, revision=revision + 1)
    assert (await router.choose(query())).matched_tokens == 0


async def test_note_expires_after_twice_its_prediction(server):
    slack = {"EXPIRY_SLACK_MS": -1_600}
    async with Fleet.of(server, **LASTING, **slack) as workers:
        for record in WORKERS:
            await workers.beat(record)
        # 640 tokens at 1000 tokens per second: twice 0.64 s less the slack is in the past.
        assert (await route(workers, seed=1)).matched_tokens == 0
        assert (await route(workers, seed=2)).matched_tokens == 0


async def test_old_notes_are_dropped_at_the_bound(server):
    async with Fleet.of(server, **LASTING, MAX_NOTES=3 * len(CHAIN) // 2) as workers:
        await workers.beat(make_record("w", load=make_load(room_tokens=1e9)))
        for number in range(4):
            assert (await route(workers, seed=1, salt=str(number))).matched_tokens == 0
        matched = [(await route(workers, seed=1, salt=str(number))).matched_tokens for number in (3, 2, 0)]
        assert matched == [len(PROMPT), len(PROMPT), 0]


async def test_prefix_in_flight_is_no_source_of_a_fetch(fleet, router):
    """The worker that computes the prompt is so busy that another one would fetch a prefix that is there."""
    busy, idle = make_record("busy"), make_record("idle", load=make_load(queue_tokens=100_000))
    await fleet.join(router, busy, idle)
    first = await router.choose(query())
    assert computing(first) == "busy"
    await fleet.beat(make_record("busy", load=make_load(queue_tokens=100_000)))
    await fleet.beat(make_record("idle"))
    second = await router.choose(query())
    assert (computing(second), second.fetch, second.matched_tokens) == ("idle", None, 0)
    await router.release(second)
    await fleet.cache(busy, CHAIN)
    third = await router.choose(query())
    assert (computing(third), third.fetch and third.fetch.tokens) == ("idle", len(PROMPT))


async def route(workers: Fleet, *, seed: int, salt: str = "", prompt: tuple[int, ...] = PROMPT, exclude=frozenset()):
    routed = await workers.index.route(
        model=MODEL,
        demand=Demand(prompt_tokens=len(prompt), output_tokens=16, local_prefill_tokens=2048),
        page_size=PAGE,
        chain=b"".join(chain_of(prompt, salt)),
        exclude=exclude,
        seed=seed,
    )
    assert routed is not None
    return routed


@pytest.mark.parametrize("seed", range(40))
async def test_redis_prices_prompts_in_flight_as_the_formula(server, seed):
    """Random fleets, with some blocks in the index and some in flight; reservations of the first prompt are released in
    the report, so that only the note is left."""
    random = Random(seed)
    fleet, noted, coming = [], random.sample(range(6), 2), dict.fromkeys(range(6), 0)
    async with Fleet.of(server, **LASTING) as workers:
        for number in range(6):
            role = random.choice([Role.BOTH, Role.BOTH, Role.PREFILL, Role.DECODE])
            record = make_record(f"w{number}", Role.BOTH if number in noted else role)
            await workers.beat(record)
            fleet.append((record, random.choice([0, 0, random.randrange(len(CHAIN))])))
            await workers.cache(record, CHAIN[: fleet[-1][1]])
        for number in noted:
            others = frozenset(record.view.incarnation for record, _ in fleet if record is not fleet[number][0])
            shorter = PROMPT[: random.randrange(1, len(CHAIN) + 1) * PAGE]
            routed = await route(workers, seed=seed, prompt=shorter, exclude=others)
            assert routed.decode == f"w{number}@1"
            coming[number] = len(shorter)
        candidates = []
        for number, (record, blocks) in enumerate(fleet):
            load = make_load(
                queue_tokens=random.choice([0, random.uniform(0, 3000)]), prefill_rate=random.uniform(500, 5000)
            )
            # A report that is newer than the reservation.
            await workers.beat(make_record(record.view.worker_id, record.view.role, load=load), report_age_s=-1.0)
            held = blocks * PAGE
            matched = max(held, coming[number])
            candidates.append(Candidate(view=record.view, load=load, matched=matched, in_flight=matched - held))
        option = select(candidates, DEMAND, random)
        routed = await route(workers, seed=seed)
    assert sum(term.seconds for term in routed.terms) == pytest.approx(option.cost, abs=2e-4)
    by_name = {candidate.view.incarnation: candidate for candidate in candidates}
    assert routed.matched_tokens == by_name[routed.prefill or routed.decode].matched
    if routed.fetch is not None:
        assert routed.fetch.tokens == by_name[routed.fetch.source].held


@pytest.fixture
async def without_redis():
    """A router whose Redis has gone, with four workers in its last view."""
    server = RedisServer.start()
    gateway = patient_router(server)
    try:
        async with Fleet.of(server, **LASTING) as workers:
            await gateway.start()
            await workers.join(gateway, *WORKERS)
        server.stop()
        yield gateway
    finally:
        await gateway.stop()
        server.stop()


async def test_equal_prompts_without_redis_meet_on_one_worker(without_redis):
    choices = [await without_redis.choose(query()) for _ in range(4)]
    assert {choice.source for choice in choices} == {Source.LOCAL}
    assert len({computing(choice) for choice in choices}) == 1


async def test_prompts_without_redis_follow_those_in_flight(without_redis):
    """And not the guess: the worker that the first block hashes to is left out of the first choice only."""
    home = await without_redis.choose(query())
    await without_redis.release(home)
    excluded = frozenset({(home.prefill or home.decode).incarnation})
    elsewhere = await without_redis.choose(query(exclude=excluded))
    assert computing(elsewhere) != computing(home)
    assert computing(await without_redis.choose(query())) == computing(elsewhere)
