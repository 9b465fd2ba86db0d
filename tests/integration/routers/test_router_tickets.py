"""Tickets between two routers on a real Redis: one chooses, the other carries out."""

from dataclasses import replace

import pytest

from tandem_engine.config import Role
from tandem_services.router.decision import RouteQuery, Source
from tandem_services.router.router import Router
from tandem_services.router.tickets import new_ticket_id
from tandem_testing.router_builders import LASTING, MODEL, PAGE, make_record, patient_router

QUERY = RouteQuery(request_id="r", model=MODEL, token_ids=tuple(range(20 * PAGE)), max_tokens=16)


@pytest.fixture
async def routers(server, fleet, monkeypatch):
    """The one that chooses and the one that carries out; a pair and a worker that does both."""
    monkeypatch.setattr("tandem_services.router.tickets.RESERVATION_MS", LASTING["RESERVATION_MS"])
    both = patient_router(server), patient_router(server, seed=2)
    for record in (make_record("p", Role.PREFILL), make_record("d", Role.DECODE)):
        await fleet.beat(record)
    for router in both:
        await router.start()
    yield both
    for router in both:
        await router.stop()


async def queued(router: Router) -> float:
    """Seconds that another prompt would wait for at the prefill worker."""
    choice = await router.choose(replace(QUERY, token_ids=tuple(range(5000, 5000 + 20 * PAGE))))
    await router.release(choice)
    return {term.name: term.seconds for term in choice.terms}["prefill_queue"]


async def issued(router: Router, query: RouteQuery = QUERY):
    choice, ticket = await router.choose(query), new_ticket_id()
    assert await router.issue_ticket(ticket, choice, query)
    return choice, ticket


async def test_redeemed_ticket_transfers_choice_and_reservation(routers):
    chooser, carrier = routers
    choice, ticket = await issued(chooser)
    redeemed = await carrier.redeem(ticket, replace(QUERY, request_id="mine"))
    assert redeemed is not None
    assert (redeemed.decode, redeemed.prefill, redeemed.terms) == (choice.decode, choice.prefill, choice.terms)
    assert (redeemed.source, redeemed.request_id) == (Source.ROUTER, "mine")
    # The chooser has nothing to give back any more: what is reserved counts on.
    await chooser.release_unredeemed(ticket, choice)
    assert await queued(carrier) > 0
    await carrier.release(redeemed)
    assert await queued(carrier) == 0


async def test_ticket_can_be_redeemed_once(routers):
    chooser, carrier = routers
    _, ticket = await issued(chooser)
    assert await carrier.redeem(ticket, QUERY) is not None
    assert await carrier.redeem(ticket, QUERY) is None
    assert await carrier.redeem(new_ticket_id(), QUERY) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": (*QUERY.token_ids, 1)},
        {"cache_salt": "another tenant"},
        {"model": "another"},
        {"exclude": frozenset({"d@1"})},
        {"compat_hash": "other weights"},
    ],
    ids=lambda changes: next(iter(changes)),
)
async def test_ticket_of_other_query_is_void_and_reservation_released(routers, changes):
    chooser, carrier = routers
    _, ticket = await issued(chooser)
    assert await carrier.redeem(ticket, replace(QUERY, **changes)) is None
    assert await queued(carrier) == 0


async def test_ticket_for_a_worker_found_dead_is_void(routers):
    chooser, carrier = routers
    _, ticket = await issued(chooser)
    carrier.mark_dead("p@1")
    assert await carrier.redeem(ticket, QUERY) is None


async def test_unredeemed_ticket_is_released_by_its_router(routers):
    chooser, carrier = routers
    choice, ticket = await issued(chooser)
    await chooser.release_unredeemed(ticket, choice)
    assert await queued(carrier) == 0
    assert await carrier.redeem(ticket, QUERY) is None


async def test_malformed_ticket_is_void(server, routers):
    ticket = new_ticket_id()
    for garbage in ("x", "\x91\xc0", ""):
        server.command("SET", f"tandem:{{default}}:ticket:{ticket}", garbage)
        assert await routers[1].redeem(ticket, QUERY) is None


async def test_tickets_without_redis_are_none_and_no_error(server, routers):
    chooser, carrier = routers
    choice, ticket = await issued(chooser)
    server.kill()
    try:
        assert await carrier.redeem(ticket, QUERY) is None
        await chooser.release_unredeemed(ticket, choice)
        local = await chooser.choose(QUERY)
        assert local.source is Source.LOCAL
        assert not await chooser.issue_ticket(new_ticket_id(), local, QUERY)
    finally:
        server.restart()
