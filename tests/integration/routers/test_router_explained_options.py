"""What a decision was made from, as a real Redis and the last view tell it."""

from functools import partial

import pytest

from tandem_engine.config import Role
from tandem_services.router.decision import EXPLAINED_OPTIONS, Source
from tandem_testing.router_builders import (
    PAGE,
    chain_of,
    make_load,
    make_query,
    make_record,
    patient_router,
)
from tandem_testing.service_clock import ServiceClock

PROMPT = tuple(range(20 * PAGE))


@pytest.fixture
def make_router(server):
    return lambda explained_per_second=100, **options: patient_router(
        server, explained_per_second=explained_per_second, **options
    )


@pytest.fixture
async def router(make_router):
    gateway = make_router()
    await gateway.start()
    yield gateway
    await gateway.stop()


query = partial(make_query, token_ids=PROMPT)


def ways(choice) -> list[tuple[str | None, str]]:
    return [(option.prefill, option.decode) for option in choice.priced.options]


async def test_explained_options_have_prices_chosen_one_first(fleet, router):
    busy, idle = make_record("busy", Role.PREFILL, load=make_load(queue_tokens=9000)), make_record("idle", Role.PREFILL)
    decode = make_record("d", Role.DECODE)
    await fleet.join(router, busy, idle, decode)
    await fleet.cache(decode, chain_of(PROMPT[: 4 * PAGE]))
    choice = await router.choose(query())
    assert choice.source is Source.REDIS
    assert ways(choice) == [("idle@1", "d@1"), (None, "d@1"), ("busy@1", "d@1")]
    assert choice.priced.more == 0
    first, _, last = choice.priced.options
    assert first.terms == choice.terms
    assert (first.matched_tokens, first.decode_matched_tokens) == (0, 4 * PAGE)
    assert {term.name: term.seconds for term in last.terms}["prefill_queue"] == pytest.approx(9.0)
    for option in choice.priced.options:
        assert option.predicted_s == pytest.approx(sum(term.seconds for term in option.terms))


async def test_host_memory_part_of_a_match_is_explained_and_priced(fleet, router):
    """A copy from host memory takes its time: of two that have all of it, the one whose device has it is chosen."""
    load = make_load(host_token_s=1e-4)
    on_device, in_host = make_record("device", load=load), make_record("host", load=load)
    await fleet.join(router, on_device, in_host)
    chain = chain_of(PROMPT)
    await fleet.cache(on_device, chain)
    await fleet.cache(in_host, chain, in_host=12)
    choice = await router.choose(query())
    alone = [option for option in choice.priced.options if option.prefill is None]
    cheap, dear = sorted(alone, key=lambda option: option.predicted_s)
    assert cheap is choice.priced.options[0]
    assert (cheap.decode, cheap.matched_tokens, cheap.matched_host_tokens) == ("device@1", 20 * PAGE, 0)
    assert (dear.decode, dear.matched_tokens, dear.matched_host_tokens) == ("host@1", 20 * PAGE, 12 * PAGE)
    assert {term.name: term.seconds for term in dear.terms}["host_load"] == pytest.approx(12 * PAGE * 1e-4)
    await router.release(choice)


async def test_fetch_of_an_option_is_explained(fleet, router):
    home = make_record("home", Role.PREFILL, load=make_load(queue_tokens=100_000, prefill_rate=10_000))
    await fleet.join(router, home, make_record("idle", Role.PREFILL), make_record("d", Role.DECODE))
    await fleet.cache(home, chain_of(PROMPT))
    choice = await router.choose(query(token_ids=(*PROMPT, 1, 2)))
    option = choice.priced.options[0]
    assert (option.fetch.source, option.fetch.tokens) == ("home@1", len(PROMPT))
    assert option.fetch.seconds == choice.fetch.seconds
    assert option.matched_tokens == 0


async def test_large_fleet_explains_best_options_and_counts_others(fleet, router):
    prefills = [make_record(f"p{number}", Role.PREFILL, load=make_load(queue_tokens=number)) for number in range(3)]
    decodes = [make_record(f"d{number}", Role.DECODE, load=make_load(sequences=number)) for number in range(4)]
    await fleet.join(router, *prefills, *decodes)
    choice = await router.choose(query())
    assert len(set(ways(choice))) == EXPLAINED_OPTIONS
    assert choice.priced.more == 3 * 4 + 4 - EXPLAINED_OPTIONS
    prices = [option.predicted_s for option in choice.priced.options]
    assert prices == sorted(prices)
    # A prompt on the worker with three running sequences delays them: dearest.
    assert (None, "d3@1") not in ways(choice)


async def test_explained_decision_equals_unexplained_one(fleet, make_router):
    silent, explaining = make_router(0), make_router()
    for router in (silent, explaining):
        await router.start()
    await fleet.join(silent, *(make_record(f"p{n}", Role.PREFILL) for n in range(6)), make_record("d", Role.DECODE))
    await explaining.refresh()
    for _ in range(5):
        one = await silent.choose(query())
        await silent.release(one)
        other = await explaining.choose(query())
        await explaining.release(other)
        assert one.priced is None
        assert (one.prefill, one.decode, one.terms) == (other.prefill, other.decode, other.terms)
    for router in (silent, explaining):
        await router.stop()


async def test_decisions_explained_per_second_are_bounded(fleet, make_router):
    clock = ServiceClock()
    router = make_router(2, clock=clock)
    await router.start()
    await fleet.join(router, make_record("w"))
    explained = [(await router.choose(query())).priced is not None for _ in range(4)]
    clock.advance(1.0)
    explained += [(await router.choose(query())).priced is not None for _ in range(3)]
    await router.stop()
    assert explained == [True, True, False, False, True, True, False]


async def test_decision_without_redis_is_explained_from_last_view(fleet, router, server):
    await fleet.join(router, make_record("p", Role.PREFILL), make_record("d", Role.DECODE))
    server.command("FLUSHALL")
    choice = await router.choose(query())
    assert choice.source is Source.LOCAL
    assert set(ways(choice)) == {("p@1", "d@1"), (None, "d@1")}
    assert choice.priced.options[0].terms == choice.terms


async def test_migration_target_price_excludes_prefill_compute(fleet, router):
    leaving, taker = make_record("leaving", Role.DECODE), make_record("taker", Role.DECODE)
    await fleet.join(router, leaving, taker, make_record("p", Role.PREFILL))
    choice = await router.relocate(query(), leaving.view)
    assert choice.priced is None
