"""Choices of one answer go to one place, under one reservation."""

import asyncio

from tandem_services.gateway.shared_route import SharedRoute
from tandem_services.router.choice import RouteQuery
from tandem_testing.gateway_builders import EngineRack, FakeChooser
from tandem_testing.mock_engine import MockBehaviour, hash_tokens


def query(max_tokens: int = 10) -> RouteQuery:
    return RouteQuery(request_id="r", model="mock", token_ids=(1, 2, 3), max_tokens=max_tokens)


def lone_worker(rack: EngineRack) -> FakeChooser:
    return FakeChooser([rack.add("w", MockBehaviour(token=hash_tokens(3, 200))).view])


async def test_the_router_is_asked_once_for_all_choices(rack):
    chooser = lone_worker(rack)
    route = SharedRoute(choices=3)
    taken = await asyncio.gather(*(route.choose(query(), chooser.choose) for _ in range(3)))
    assert all(choice is taken[0] for choice in taken)
    assert [asked.max_tokens for asked in chooser.queries] == [30]


async def test_the_reservation_is_given_back_by_the_last_one(rack):
    route, chooser = SharedRoute(choices=2), lone_worker(rack)
    choice = await route.choose(query(), chooser.choose)
    assert await route.choose(query(), chooser.choose) is choice
    assert [route.let_go(choice), route.let_go(choice)] == [False, True]


async def test_a_choice_that_comes_after_all_others_left_asks_again(rack):
    chooser = lone_worker(rack)
    route = SharedRoute(choices=2)
    assert route.let_go(await route.choose(query(), chooser.choose))
    assert route.let_go(await route.choose(query(), chooser.choose))
    assert len(chooser.queries) == 2


async def test_a_choice_of_a_later_attempt_is_not_held_by_the_route(rack):
    chooser = lone_worker(rack)
    route = SharedRoute(choices=2)
    await route.choose(query(), chooser.choose)
    assert route.let_go(await chooser.choose(query()))
