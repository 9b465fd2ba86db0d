"""What the queue of one gateway tells the others, leaves to them and takes from them."""

import asyncio
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from tandem_services.common.metrics import MetricFamilies
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.gateway.access.tenants import Tenant
from tandem_services.gateway.queueing.admission import QueueMetrics
from tandem_services.gateway.queueing.fair_queue import HEAD_AFTER_S, TAKE_S, YIELD_S, FairQueue, SharedCounters
from tandem_services.gateway.queueing.late_binding import LateBinding
from tandem_services.gateway.queueing.queue_entry import Verdict
from tandem_services.gateway.queueing.queue_timeouts import AdmissionPolicy
from tandem_services.gateway.queueing.turnover import UNREPORTED_S
from tandem_services.router.cost import NO_ROOM_S
from tandem_services.router.decision import NoWorkersError, RouteDecision, ScoreTerm, WorkerView
from tandem_services.router.scoring import DECODE_ROOM
from tandem_services.router.shared_state import QueueHead, RemoteHead, Report, Standing
from tandem_services.router.usage_counters import VirtualCounters
from tandem_testing.router_builders import make_choice, make_view
from tandem_testing.service_clock import ServiceClock

TENANT = Tenant(name="busy", sha256=())
BEHIND = (RemoteHead(priority=0, value=10.0),)


@dataclass
class Board:
    """Answers what a test says that Redis would."""

    heads: tuple[RemoteHead, ...] = ()
    places: int = 0
    reachable: bool = True
    reports: list[Report] = field(default_factory=list)

    async def sync(self, report: Report) -> Standing:
        self.reports.append(report)
        if not self.reachable:
            raise RedisUnavailableError("no answer")
        values = {charge.tenant: 1000.0 for charge in report.charges}
        return Standing(values=values, floor=0.0, heads=self.heads, places=self.places)


@dataclass
class Full:
    """A fleet without room by its workers' last reports; or without a worker that could take a request."""

    able: bool = True
    asked: int = 0

    def workers(self) -> tuple[WorkerView, ...]:
        return (make_view("w"),)

    async def ask(self) -> RouteDecision:
        self.asked += 1
        if not self.able:
            raise NoWorkersError("nobody", retry_after=2.0)
        return make_choice("r", make_view("w"), terms=(ScoreTerm(DECODE_ROOM, NO_ROOM_S),))

    async def refuse(self) -> RouteDecision:
        raise NoWorkersError("nobody can take this one", retry_after=2.0)

    async def release(self, choice: RouteDecision) -> None: ...


class Gateway:
    """With a queue of requests of one tenant."""

    def __init__(self, **fleet: bool) -> None:
        self.board, self.fleet, self.clock = Board(), Full(**fleet), ServiceClock()
        counters = VirtualCounters()
        self.binding = LateBinding(
            chooser=self.fleet,
            clock=self.clock,
            queue=FairQueue(seats=9, counters=counters),
            counters=SharedCounters(counters=counters, board=self.board),
            observer=QueueMetrics(MetricFamilies(CollectorRegistry()), model="m"),
            policy=AdmissionPolicy(),
        )

    async def come(self, *, able: bool = True) -> "asyncio.Future[RouteDecision]":
        answer: asyncio.Future[RouteDecision] = asyncio.get_running_loop().create_future()
        ask = self.fleet.ask if able else self.fleet.refuse
        entry = self.binding.entry(ask, answer, tenant=TENANT, priority=0, prompt_tokens=100)
        assert await self.binding.arrive(entry) is None
        return answer

    async def report(self) -> Report:
        await self.binding.sync()
        return self.board.reports[-1]


@pytest.mark.parametrize("able", [True, False])
async def test_only_placeable_waiting_queue_head_is_reported(able):
    gateway = Gateway(able=able)
    await gateway.come()
    assert (await gateway.report()).head is None
    gateway.clock.advance(HEAD_AFTER_S + 0.01)
    assert (await gateway.report()).head == (QueueHead(priority=0, tenant="busy") if able else None)


async def test_slots_are_left_to_gateway_with_lower_counter():
    gateway = Gateway()
    answer = await gateway.come()
    gateway.board.heads = BEHIND
    assert (await gateway.report()).wanted == 1
    asked = gateway.fleet.asked
    gateway.binding.freed()
    assert not await gateway.binding.turn()
    assert gateway.fleet.asked == asked
    reported = await gateway.report()
    assert (reported.left, reported.wanted) == (1, 0)
    gateway.clock.advance(YIELD_S + 0.01)
    # A place that no gateway has taken comes back, and is used.
    gateway.board.places = 1
    assert (await gateway.report()).wanted == 1
    assert await gateway.binding.turn()
    assert answer.done()


async def test_without_redis_places_are_kept_and_used():
    gateway = Gateway()
    answer = await gateway.come()
    gateway.board.heads = BEHIND
    await gateway.report()
    gateway.board.reachable = False
    gateway.binding.freed()
    assert (await gateway.report()).left == 1
    gateway.clock.advance(YIELD_S + TAKE_S + 0.1)
    assert await gateway.binding.turn()
    assert answer.done()


async def test_unplaceable_requests_claim_no_slots_of_other_gateways():
    """They took each place that was left to others, and requests that came later filled full workers with them."""
    gateway = Gateway()
    for _ in range(4):
        await gateway.come(able=False)
    while any(entry.verdict is not Verdict.NO_WORKER for entry in gateway.binding.queue):
        await gateway.binding.turn()
    assert (await gateway.report()).wanted == 0
    answer = await gateway.come()
    # More than were wanted: of an answer that came late, or is malformed.
    gateway.board.places = 10**12
    assert (await gateway.report()).wanted == 1
    later = await gateway.come()
    assert await gateway.binding.turn()
    assert not await gateway.binding.turn()
    assert (answer.done(), later.done()) == (True, False)


@pytest.mark.parametrize("left", [True, False])
async def test_unused_freed_slot_expires(left):
    """A worker has reported it by then: counted as well, it would be filled twice."""
    gateway = Gateway()
    await gateway.come(able=False)
    if left:
        gateway.board.places = 1
        gone = await gateway.come()
        assert (await gateway.report()).wanted == 1
        gateway.binding.leave(next(entry for entry in gateway.binding.queue if entry.decision is gone))
    else:
        gateway.binding.freed()
    gateway.board.places = 0
    gateway.clock.advance(UNREPORTED_S + 0.01)
    answer = await gateway.come()
    assert not await gateway.binding.turn()
    assert not answer.done()
    gateway.binding.freed()
    assert await gateway.binding.turn()
    assert answer.done()


async def test_place_that_another_gateway_gave_up_lets_a_waiting_request_start():
    gateway = Gateway()
    first, second = await gateway.come(), await gateway.come()
    assert not await gateway.binding.turn()
    gateway.board.places = 1
    assert (await gateway.report()).wanted == 2
    assert await gateway.binding.turn()
    assert not await gateway.binding.turn()
    assert (first.done(), second.done()) == (True, False)
