"""Which requests pass one that lacks capacity, and onto which workers."""

from dataclasses import replace

import pytest

from tandem_engine.config import Role
from tandem_engine.messages.control import ServedAdapter
from tandem_services.gateway.queueing.lanes import BlockedLanes, Lane
from tandem_services.gateway.queueing.turnover import UNREPORTED_S, Turnover
from tandem_services.router.cost import NO_ROOM_S
from tandem_services.router.decision import RouteDecision, ScoreTerm, WorkerView
from tandem_services.router.scoring import DECODE_ROOM, PREFILL_QUEUE
from tandem_testing.router_builders import make_choice, make_view
from tandem_testing.service_clock import ServiceClock

DIGESTS = {"a": b"a" * 16, "b": b"b" * 16, "c": b"c" * 16}


def worker(name: str, adapters: str = "", role: Role = Role.BOTH) -> WorkerView:
    served = {each: ServedAdapter(name=each, digest=DIGESTS[each].hex(), rank=1, root="") for each in adapters}
    return make_view(name, role=role, adapters=served)


def lane(adapter: str = "") -> Lane:
    async def apart(_: frozenset[str]) -> RouteDecision:
        raise AssertionError("no router is queried here")

    return Lane(adapter=DIGESTS.get(adapter, b""), ask_apart=apart)


def full(decode: WorkerView, prefill: WorkerView | None = None) -> RouteDecision:
    """For want of a place to generate."""
    choice = make_choice("r", decode, terms=(ScoreTerm(DECODE_ROOM, NO_ROOM_S),))
    return replace(choice, prefill=prefill)


def names(blocked: BlockedLanes) -> set[str]:
    return {incarnation.partition("@")[0] for incarnation in blocked.avoided}


def held(blocked: BlockedLanes, *adapters: str) -> list[str]:
    return [adapter for adapter in adapters if blocked.hold(lane(adapter))]


def test_request_of_an_adapter_blocks_its_workers_alone():
    workers = (worker("w0", "a"), worker("w1", "ab"), worker("w2", "c"))
    blocked = BlockedLanes(workers=workers)
    assert (bool(blocked), held(blocked, "", "a", "b", "c")) == (False, [])
    blocked.block(lane("a"), full(workers[0]))
    # All workers of b are among those that the request waits for.
    assert (names(blocked), held(blocked, "", "a", "b", "c")) == ({"w0", "w1"}, ["a", "b"])
    blocked.block(lane(), full(workers[2]))
    assert (names(blocked), held(blocked, "", "a", "b", "c")) == ({"w0", "w1", "w2"}, ["", "a", "b", "c"])


def test_nothing_passes_a_request_of_the_model_alone():
    workers = (worker("w0", "a"), worker("w1"))
    for own in (lane(), None):
        blocked = BlockedLanes(workers=workers)
        blocked.block(own, full(workers[0]))
        assert held(blocked, "", "a") == ["", "a"]
        assert blocked.hold(None)


def test_adapter_of_no_worker_is_passed_and_never_tried():
    blocked = BlockedLanes(workers=(worker("w0", "a"),))
    assert held(blocked, "", "a", "b") == ["b"]


def test_request_that_waits_to_generate_leaves_prefill_workers():
    workers = (
        worker("p", "ab", Role.PREFILL),
        worker("d0", "a", Role.DECODE),
        worker("d1", "b", Role.DECODE),
    )
    blocked = BlockedLanes(workers=workers)
    blocked.block(lane("a"), full(workers[1], workers[0]))
    assert (names(blocked), held(blocked, "", "a", "b")) == ({"d0"}, ["a"])


def test_request_that_waits_for_prompts_leaves_decode_workers():
    workers = (
        worker("p0", "a", Role.PREFILL),
        worker("p1", "b", Role.PREFILL),
        worker("d", "ab", Role.DECODE),
    )
    choice = make_choice("r", workers[2], terms=(ScoreTerm(PREFILL_QUEUE, 9.0),))
    blocked = BlockedLanes(workers=workers)
    blocked.block(lane("a"), replace(choice, prefill=workers[0]))
    assert (names(blocked), held(blocked, "", "a", "b")) == ({"p0"}, ["a"])
    # Where the decode worker would compute the prompt itself, it is that one.
    blocked = BlockedLanes(workers=workers)
    blocked.block(lane("a"), choice)
    assert (names(blocked), held(blocked, "", "a", "b")) == ({"d"}, ["", "a", "b"])


def test_request_that_finds_no_other_worker_blocks_its_adapter():
    workers = (worker("w0", "a"), worker("w1", "b"))
    blocked = BlockedLanes(workers=workers)
    blocked.block(lane("a"), full(workers[0]))
    blocked.block(lane("b"), None)
    assert (names(blocked), held(blocked, "", "a", "b")) == ({"w0"}, ["a", "b"])


@pytest.fixture
def clock() -> ServiceClock:
    return ServiceClock()


def test_freed_place_at_a_worker_goes_only_to_requests_that_may_run_there(clock):
    turnover = Turnover(clock=clock)
    turnover.add(1, worker="w0@1")
    turnover.add(1, worker="w1@1")
    turnover.add(1)
    assert not turnover.take({"w2@1"}.__contains__)
    assert turnover.take({"w1@1"}.__contains__)
    assert not turnover.take({"w1@1"}.__contains__)
    assert [turnover.take(), turnover.take(), turnover.take()] == [True, True, False]


def test_freed_place_in_a_cell_goes_only_to_requests_of_that_cell(clock):
    turnover = Turnover(clock=clock)
    for cell in ("", "west", "west"):
        turnover.add(1, worker="w0@1", cell=cell)
    assert not turnover.take(cell="east")
    assert [turnover.take(cell="west"), turnover.take(), turnover.take()] == [True, True, False]
    turnover.add(1)
    assert (turnover.leave(), len(turnover)) == (1, 0), "other gateways of the own cell may take one"


def test_place_expires_whatever_its_worker(clock):
    turnover = Turnover(clock=clock)
    turnover.add(2, worker="w0@1")
    clock.advance(UNREPORTED_S + 0.1)
    assert (len(turnover), turnover.take({"w0@1"}.__contains__)) == (0, False)
