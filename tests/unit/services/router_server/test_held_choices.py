"""Choices that front ends hold, and what explain remembers of them."""

from dataclasses import dataclass, field

import pytest

from tandem_services.router.decision import RouteDecision, Source
from tandem_services.router_server.routing_service import Held, Holds
from tandem_services.router_server.schemas import ChoiceRecord, ChosenRoute
from tandem_testing.router_builders import make_choice, make_view
from tandem_testing.service_clock import ServiceClock


@dataclass
class Ledger:
    """Releases, as a router would see them."""

    released: list[str] = field(default_factory=list)
    unredeemed: list[str] = field(default_factory=list)

    async def release(self, choice: RouteDecision) -> None:
        self.released.append(choice.request_id)

    async def release_unredeemed(self, ticket_id: str, choice: RouteDecision) -> None:
        self.unredeemed.append(ticket_id)


def held(name: str, clock: ServiceClock, *, request_id: str = "", for_gateway: bool = False) -> Held:
    choice = make_choice(name, make_view("d"), source=Source.REDIS)
    route = ChosenRoute(
        reservation=name,
        expires_in_s=10.0,
        placement="alone",
        source="redis",
        decode=choice.decode,
        prefill=None,
        fetch=None,
        prompt_tokens=1,
        matched_tokens=0,
        predicted_s=0.0,
        terms=(),
        has_room=True,
        for_gateway=for_gateway,
    )
    record = ChoiceRecord(request_id=request_id or f"request {name}", model="m", interface="http", choice=route)
    return Held(choice=choice, record=record, since=clock.now())


@pytest.fixture
def clock() -> ServiceClock:
    return ServiceClock()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def holds(ledger, clock) -> Holds:
    return Holds(router=ledger, clock=clock, ttl_s=10.0, capacity=3, remembered=4)


async def test_choice_is_released_once(holds, ledger, clock):
    assert holds.hold(held("a", clock)) == []
    assert [await holds.release("a"), await holds.release("a"), await holds.release("b")] == [True, False, False]
    assert ledger.released == ["a"]
    assert holds.find("a").state == "released"


async def test_release_for_gateway_leaves_redeemed_claims(holds, ledger, clock):
    holds.hold(held("a", clock, for_gateway=True))
    await holds.release("a")
    assert (ledger.released, ledger.unredeemed) == ([], ["a"])


async def test_unreleased_choice_expires(holds, ledger, clock):
    holds.hold(held("old", clock))
    clock.advance(6.0)
    holds.hold(held("young", clock))
    clock.advance(4.0)
    await holds.expire()
    assert (ledger.released, len(holds)) == (["old"], 1)
    assert (holds.find("old").state, holds.find("young").state) == ("expired", "open")
    assert holds.find("young").age_s == 4.0


async def test_oldest_held_choice_is_evicted_at_the_limit(holds, clock):
    for name in "abc":
        assert holds.hold(held(name, clock)) == []
    dropped = holds.hold(held("d", clock))
    assert [each.reservation for each in dropped] == ["a"]
    assert not await holds.release("a")
    assert len(holds) == 3


async def test_choice_records_are_bounded_and_newest_is_found(holds, clock):
    for name in ("a", "b"):
        holds.hold(held(name, clock, request_id="same"))
    assert holds.find("same").choice.reservation == "b"
    for name in ("c", "d", "e"):
        for dropped in holds.hold(held(name, clock)):
            await holds.give_back(dropped, "expired")
    assert holds.find("a") is None
    assert holds.find("same").choice.reservation == "b"
    assert [record.choice.reservation for record in holds.newest(2)] == ["e", "d"]
    holds.hold(held("f", clock))
    assert holds.find("same") is None


async def test_held_choices_are_all_released_at_shutdown(holds, ledger, clock):
    for name in "ab":
        holds.hold(held(name, clock))
    await holds.close()
    assert sorted(ledger.released) == ["a", "b"]
    assert len(holds) == 0
