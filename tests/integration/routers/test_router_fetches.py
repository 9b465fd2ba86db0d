"""Prefixes that are worth fetching, as a real Redis finds them and returns them to the gateway."""

from dataclasses import replace
from functools import partial

import pytest

from tandem_engine.config import Role
from tandem_services.router.decision import Source
from tandem_services.router.registry import WorkerState
from tandem_testing.router_builders import (
    PAGE,
    chain_of,
    make_link,
    make_load,
    make_query,
    make_record,
    patient_router,
)

PROMPT = tuple(range(60 * PAGE))
TURN = (*PROMPT, *range(PAGE))
CHAIN = chain_of(PROMPT)
BUSY = make_load(queue_tokens=100_000, prefill_rate=10_000)


@pytest.fixture
async def router(server):
    gateway = patient_router(server, local_prefill_tokens=0)
    await gateway.start()
    yield gateway
    await gateway.stop()


query = partial(make_query, token_ids=TURN)


async def test_idle_worker_fetches_prefix_from_busy_holder(fleet, router):
    home = make_record("home", Role.PREFILL, load=BUSY)
    await fleet.join(router, home, make_record("idle", Role.PREFILL), make_record("d", Role.DECODE))
    await fleet.cache(home, CHAIN)
    choice = await router.choose(query())
    assert choice.source is Source.REDIS
    assert choice.prefill is not None
    assert choice.prefill.worker_id == "idle"
    assert choice.fetch is not None
    assert (choice.fetch.source, choice.fetch.tokens) == (home.view, len(PROMPT))
    assert choice.fetch.within_s >= len(PROMPT) / 1000
    assert choice.matched_tokens == 0
    terms = {term.name: term.seconds for term in choice.terms}
    assert terms["prefix_fetch"] == pytest.approx(choice.fetch.seconds)
    assert terms["prefill_compute"] == pytest.approx(PAGE / 1000)
    # The next gateway sees what is really left to compute there.
    assert [claim.queue_tokens for claim in choice.reservation.claims] == [PAGE, 0]


async def test_decode_worker_is_named_for_the_next_turn(fleet, router):
    decode = make_record("d", Role.DECODE)
    await fleet.join(router, make_record("p", Role.PREFILL), decode)
    await fleet.cache(decode, CHAIN)
    choice = await router.choose(query())
    assert choice.prefill is not None
    assert choice.fetch is not None
    assert choice.fetch.source.worker_id == "d"


@pytest.mark.parametrize("fact", ["salt", "excluded", "broken", "draining", "paired differently"])
async def test_unusable_workers_are_no_fetch_source(fleet, router, fact):
    idle = make_record("idle", Role.PREFILL)
    changes = {"compat_hash": "other"} if fact == "paired differently" else {}
    links = (make_link(idle, 0.0, broken=True),) if fact == "broken" else ()
    home = make_record("home", Role.PREFILL, load=BUSY, links=links, **changes)
    await fleet.join(router, home, idle, make_record("d", Role.DECODE))
    await fleet.cache(home, chain_of(PROMPT, salt="other") if fact == "salt" else CHAIN)
    if fact == "draining":
        await fleet.beat(replace(home, state=WorkerState.DRAINING))
    exclude = frozenset({"home@1"}) if fact == "excluded" else frozenset()
    choice = await router.choose(query(exclude=exclude))
    assert choice.prefill is not None
    assert (choice.prefill.worker_id, choice.fetch) == ("idle", None)


async def test_source_that_this_gateway_does_not_know_is_not_named(fleet, router):
    home = make_record("home", Role.PREFILL, load=BUSY)
    await fleet.join(router, make_record("idle", Role.PREFILL), make_record("d", Role.DECODE))
    await fleet.beat(home)
    await fleet.cache(home, CHAIN)
    choice = await router.choose(query())
    assert choice.fetch is None
    await router.release(choice)
    await router.refresh()
    assert (await router.choose(query())).fetch is not None


async def test_migration_target_fetches_no_prefix(fleet, router):
    leaving, taker = make_record("leaving", Role.DECODE), make_record("taker", Role.DECODE)
    await fleet.join(router, leaving, taker, make_record("p", Role.PREFILL))
    await fleet.cache(taker, CHAIN)
    choice = await router.relocate(query(), leaving.view)
    assert (choice.prefill, choice.fetch) == (leaving.view, None)
