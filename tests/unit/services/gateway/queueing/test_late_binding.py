"""New requests wait at the gateway until a worker has room: order, refusals, clients that leave."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from tandem_engine.config import Role
from tandem_engine.messages.control import ServedAdapter
from tandem_services.common.errors import ApiError
from tandem_services.common.metrics import MetricFamilies
from tandem_services.gateway.access.caller import UNKNOWN
from tandem_services.gateway.access.tenants import Tenant
from tandem_services.gateway.queueing.admission import Admission, QueueMetrics
from tandem_services.gateway.queueing.fair_queue import FairQueue, SharedCounters
from tandem_services.gateway.queueing.lanes import BlockedLanes, Lane
from tandem_services.gateway.queueing.late_binding import LateBinding
from tandem_services.gateway.queueing.precedence import MAX_EARLY, RECENT_S
from tandem_services.gateway.queueing.queue_entry import Verdict
from tandem_services.gateway.queueing.queue_timeouts import AdmissionPolicy, QueueTimeouts
from tandem_services.gateway.queueing.worker_starts import WorkerStarts
from tandem_services.router.cost import NO_ROOM_S
from tandem_services.router.decision import NoWorkersError, OtherCell, RouteDecision, ScoreTerm, WorkerView
from tandem_services.router.scoring import DECODE_ROOM, PREFILL_QUEUE
from tandem_services.router.starting import StartingWorker
from tandem_services.router.usage_counters import VirtualCounters
from tandem_testing.router_builders import MODEL, make_choice, make_view
from tandem_testing.service_clock import ServiceClock
from tandem_testing.waiting import until


@dataclass
class Fleet:
    """One worker with so many places. Its report is always current, unless `stale` says that it is full."""

    places: int = 1
    taken: int = 0
    queue_s: float = 0.0
    stale: bool = False
    alive: bool = True
    too_long: int = 10_000
    asked: list[str] = field(default_factory=list)
    gate: asyncio.Event | None = None
    """Answers come only once it is set."""
    starts: tuple[StartingWorker, ...] = ()
    replaced: bool = False
    """Something replaces a lost worker."""

    def workers(self) -> tuple[WorkerView, ...]:
        return (make_view("w"),) if self.alive else ()

    def offered(self) -> tuple[WorkerView, ...]:
        return self.workers()

    def starting(self) -> tuple[StartingWorker, ...]:
        return self.starts

    async def ask(self, name: str, prompt: int) -> RouteDecision:
        self.asked.append(name)
        if self.gate is not None:
            await self.gate.wait()
        if not self.alive or prompt > self.too_long:
            raise NoWorkersError("nobody", retry_after=2.0)
        full = self.stale or self.taken >= self.places
        self.taken += 1
        terms = (ScoreTerm(PREFILL_QUEUE, self.queue_s), ScoreTerm(DECODE_ROOM, NO_ROOM_S if full else 0.0))
        return make_choice(name, make_view("w"), terms=terms)

    async def release(self, choice: RouteDecision) -> None:
        del choice
        self.taken -= 1


class QueueHarness:
    """An admission with what is around it."""

    def __init__(self, fleet: Fleet, *, seats: int = 100, **policy: float) -> None:
        self.fleet = fleet
        self.clock = ServiceClock()
        self.registry = CollectorRegistry()
        counters = VirtualCounters()
        metrics = QueueMetrics(MetricFamilies(self.registry), model="m")
        bounds = AdmissionPolicy(**{"poll_s": 0.001, **policy})
        self.binding = LateBinding(
            chooser=fleet,
            clock=self.clock,
            queue=FairQueue(seats=seats, counters=counters),
            counters=SharedCounters(counters=counters),
            observer=metrics,
            policy=bounds,
            starts=WorkerStarts(
                fleet=fleet, clock=self.clock, model=MODEL, limit_s=bounds.start_s, replaced=fleet.replaced
            ),
        )
        metrics.watch(self.binding.figures)
        self.admission = Admission(binding=self.binding)
        self.order: list[str] = []

    def come(
        self,
        name: str,
        tenant: str = "",
        *,
        prompt: int = 100,
        priority: int = 0,
        arrivals: asyncio.Semaphore | None = None,
    ) -> "asyncio.Task[RouteDecision]":
        return asyncio.create_task(self._come(name, tenant, prompt, priority, arrivals))

    async def _come(
        self, name: str, tenant: str, prompt: int, priority: int, arrivals: asyncio.Semaphore | None
    ) -> RouteDecision:
        holder = Tenant(name=tenant, sha256=()) if tenant else UNKNOWN
        choice = await self.admission.admit(
            lambda: self.fleet.ask(name, prompt),
            tenant=holder,
            priority=priority,
            prompt_tokens=prompt,
            arrivals=arrivals,
        )
        self.order.append(name)
        return choice

    async def waiting(self, count: int) -> None:
        await until(lambda: len(self.binding.queue) == count, 10.0, f"{count} wait")

    async def done(self, choice: RouteDecision) -> None:
        await self.fleet.release(choice)
        self.admission.freed()

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"tandem_gateway_{name}", {"model_name": "m", **labels})


async def test_requests_with_free_capacity_do_not_queue():
    harness = QueueHarness(Fleet(places=3))
    await asyncio.gather(*(harness.come(str(n)) for n in range(3)))
    assert harness.fleet.asked == ["0", "1", "2"]
    assert harness.value("queue_wait_seconds_bucket", le="0.0") == 3


async def test_queued_request_holds_no_reservation():
    harness = QueueHarness(Fleet(places=1))
    first = await harness.come("first")
    second = harness.come("second")
    await harness.waiting(1)
    assert harness.value("num_requests_waiting") == 1
    assert harness.fleet.taken == 1
    await harness.done(first)
    await second
    assert (harness.fleet.taken, harness.value("num_requests_waiting")) == (1, 0)


async def test_long_line_of_prompts_at_a_worker_is_no_room():
    harness = QueueHarness(Fleet(places=9, queue_s=1.5), worker_wait_s=1.0)
    waiting = harness.come("x")
    await harness.waiting(1)
    harness.fleet.queue_s = 0.5
    await waiting


async def test_end_of_a_request_in_another_cell_is_no_room_in_the_own():
    harness = QueueHarness(Fleet(places=0), poll_s=60.0)
    waiting = harness.come("x")
    await harness.waiting(1)
    tried = len(harness.fleet.asked)
    harness.admission.freed("w-west@1", OtherCell("west", "full"))
    await until(lambda: len(harness.fleet.asked) > tried, 10.0, "the queue is tried again")
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    harness.admission.freed("w@1")
    await waiting


async def serve_all(harness: QueueHarness, tasks: "list[asyncio.Task[RouteDecision]]") -> list[str]:
    """End requests one after the other as they are admitted; returns who was admitted in which order."""
    pending = set(tasks)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await harness.done(task.result())
    return harness.order


async def test_tenants_take_turns():
    harness = QueueHarness(Fleet(places=1))
    holder = await harness.come("holder", "x")
    flood = [harness.come(f"a{n}", "a") for n in range(6)]
    await harness.waiting(6)
    calm = [harness.come(f"b{n}", "b") for n in range(2)]
    await harness.waiting(8)
    await harness.done(holder)
    assert (await serve_all(harness, flood + calm))[1:5] == ["a0", "b0", "a1", "b1"]


async def crowded(harness: QueueHarness) -> "list[asyncio.Task[RouteDecision]]":
    """Prompts of the tenant `flood` wait behind others of it."""
    await harness.come("f0", "flood")
    harness.fleet.queue_s = 1.5
    flood = [harness.come(f"f{n}", "flood") for n in range(1, 4)]
    await harness.waiting(3)
    return flood


async def test_prompts_of_another_tenant_are_no_reason_to_wait():
    """Its arrival starts a round: the next one is due in a minute."""
    harness = QueueHarness(Fleet(places=9), worker_wait_s=1.0, poll_s=60.0)
    flood = await crowded(harness)
    await asyncio.wait_for(harness.come("calm", "calm", prompt=50), 30)
    assert (harness.order, len(harness.binding.queue)) == (["f0", "calm"], 3)
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    await harness.admission.close()


async def test_tenant_behind_does_not_wait_for_anothers_query():
    """And only one request of it at a time: the next one queues."""
    harness = QueueHarness(Fleet(places=1), poll_s=60.0)
    holder = await harness.come("holder", "flood", prompt=1000)
    flood = [harness.come(f"f{n}", "flood", prompt=1000) for n in range(3)]
    await harness.waiting(3)
    harness.fleet.gate = asyncio.Event()
    asked = len(harness.fleet.asked)
    harness.admission.freed()
    await until(lambda: len(harness.fleet.asked) > asked, 10.0, "the query of a turn is under way")
    calm = [harness.come(f"c{n}", "calm", prompt=10) for n in range(2)]
    await harness.waiting(4)
    assert [name for name in harness.fleet.asked if name.startswith("c")] == ["c0"]
    harness.fleet.gate.set()
    await calm[0]
    await harness.done(holder)
    await serve_all(harness, [*flood, *calm])


async def test_choices_of_one_request_query_few_at_a_time():
    """Without room the first of them find none, and the others take seats without a query."""
    harness = QueueHarness(Fleet(places=0, gate=asyncio.Event()), poll_s=60.0)
    arrivals = asyncio.Semaphore(3)
    tasks = [harness.come(str(n), "flood", arrivals=arrivals) for n in range(50)]
    await until(lambda: len(harness.fleet.asked) >= 3, 10.0, "some query")
    harness.fleet.gate.set()
    await harness.waiting(50)
    assert {*harness.fleet.asked} == {"0", "1", "2"}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await harness.admission.close()


async def test_choices_of_one_request_all_find_room_on_arrival():
    harness = QueueHarness(Fleet(places=50), poll_s=60.0)
    arrivals = asyncio.Semaphore(3)
    await asyncio.gather(*(harness.come(str(n), "flood", arrivals=arrivals) for n in range(50)))
    assert harness.fleet.asked == [str(n) for n in range(50)]
    assert harness.value("queue_wait_seconds_bucket", le="0.0") == 50


async def test_request_alone_has_not_overtaken():
    """Of one tenant none has, so that nothing is tried more often than the queue alone needs."""
    harness = QueueHarness(Fleet(places=0, queue_s=9.0), poll_s=60.0)
    tasks = [harness.come("f0", "flood"), harness.come("f1", "flood")]
    await harness.waiting(2)
    assert not any(harness.binding.has_overtaken(entry) for entry in [*harness.binding.queue][1:])
    tasks[1].cancel()
    await harness.waiting(1)
    [alone] = harness.binding.queue
    assert not harness.binding.has_overtaken(alone)
    calm = harness.come("c0", "calm", prompt=10)
    await harness.waiting(2)
    assert [v.tenant for v in harness.binding.queue if harness.binding.has_overtaken(v)] == ["calm"]
    for task in (tasks[0], calm):
        task.cancel()
    await asyncio.gather(*tasks, calm, return_exceptions=True)
    await harness.admission.close()


async def test_short_prompts_pass_a_long_one_that_has_no_room():
    """Until they add up to as much."""
    harness = QueueHarness(Fleet(places=9), worker_wait_s=1.0, poll_s=60.0)
    await harness.come("f0", "flood", prompt=300)
    harness.fleet.queue_s = 1.5
    flood = harness.come("f1", "flood", prompt=300)
    await harness.waiting(1)
    for number in range(4):
        await asyncio.wait_for(harness.come(f"c{number}", "calm", prompt=60), 30)
    late = harness.come("late", "calm", prompt=100)
    await harness.waiting(2)
    harness.fleet.queue_s = 0.5
    harness.admission.freed()
    await asyncio.gather(flood, late)
    assert harness.order == ["f0", "c0", "c1", "c2", "c3", "f1", "late"]


async def test_few_requests_of_tenants_behind_are_sent_early():
    harness = QueueHarness(Fleet(places=1), poll_s=60.0)
    holder = await harness.come("holder", "flood", prompt=1000)
    flood = [harness.come(f"f{n}", "flood") for n in range(2)]
    await harness.waiting(2)
    calm = [harness.come(f"c{n}", f"calm{n}", prompt=10) for n in range(MAX_EARLY + 1)]
    done, _ = await asyncio.wait(calm[:MAX_EARLY])
    assert (len(harness.binding.queue), harness.fleet.taken) == (3, 1 + MAX_EARLY)
    # The places that are freed next are theirs.
    for choice in [holder, *(task.result() for task in done)]:
        assert not calm[-1].done()
        await harness.done(choice)
    assert harness.fleet.taken == 0
    await serve_all(harness, [*flood, calm[-1]])


async def test_tenant_ahead_of_another_waits_for_prompts():
    harness = QueueHarness(Fleet(places=9), worker_wait_s=1.0)
    flood = await crowded(harness)
    calm = [await harness.come("c0", "calm", prompt=50), harness.come("c1", "calm", prompt=50)]
    await harness.waiting(4)
    asked = len(harness.fleet.asked)
    await until(lambda: len(harness.fleet.asked) > asked + 4, 10.0, "several rounds")
    assert harness.order == ["f0", "c0"]
    harness.fleet.queue_s = 0.5
    await asyncio.gather(*flood, calm[1])


async def test_tenant_is_forgotten_after_a_while():
    harness = QueueHarness(Fleet(places=9), worker_wait_s=1.0)
    await harness.come("calm", "calm")
    harness.clock.advance(RECENT_S + 1)
    harness.fleet.queue_s = 1.5
    alone = harness.come("late", "other", prompt=50)
    await harness.waiting(1)
    asked = len(harness.fleet.asked)
    await until(lambda: len(harness.fleet.asked) > asked + 2, 10.0, "several rounds")
    assert not alone.done()
    harness.fleet.queue_s = 0.5
    await alone


async def test_charge_equals_computed_and_generated_tokens():
    harness = QueueHarness(Fleet(places=9))
    tenant = Tenant(name="t", sha256=(), weight=2.0)
    await harness.admission.admit(lambda: harness.fleet.ask("x", 100), tenant=tenant, priority=0, prompt_tokens=100)
    harness.binding.charge_output(tenant, 10)
    counters = harness.binding.counters.counters
    assert counters.value("t") == (100 + 20) / 2
    harness.binding.correct_prompt(tenant, 100, predicted=0, cached=100)
    assert counters.value("t") == (10 + 20) / 2


async def test_stale_report_does_not_keep_freed_places_empty():
    """A worker reports once a second; as many requests as have ended go there at once."""
    harness = QueueHarness(Fleet(places=2))
    running = [await harness.come(f"r{n}") for n in range(2)]
    tasks = [harness.come(f"w{n}") for n in range(4)]
    await harness.waiting(4)
    harness.fleet.stale = True
    for choice in running:
        await harness.done(choice)
    await asyncio.gather(*tasks[:2])
    assert (harness.order[2:], harness.fleet.taken) == (["w0", "w1"], 2)
    harness.fleet.stale, harness.fleet.places = False, 4
    await asyncio.gather(*tasks)


async def test_unplaceable_request_does_not_block_others():
    harness = QueueHarness(Fleet(places=1, too_long=500))
    holder = await harness.come("holder")
    stuck = harness.come("stuck", prompt=501)
    await harness.waiting(1)
    other = harness.come("other")
    await harness.waiting(2)
    await harness.done(holder)
    await other
    assert not stuck.done()
    harness.clock.advance(10)
    with pytest.raises(ApiError) as refused:
        await stuck
    assert (refused.value.status, refused.value.retry_after) == (503, 2.0)


async def test_request_that_only_waits_for_room_is_not_overtaken():
    harness = QueueHarness(Fleet(places=1))
    holder = await harness.come("holder")
    tasks = [harness.come("first", "a"), harness.come("second", "a")]
    await harness.waiting(2)
    await harness.done(holder)
    assert (await serve_all(harness, tasks))[1:] == ["first", "second"]


@pytest.mark.parametrize(("alive", "seconds", "reason"), [(True, 60, "no_room"), (False, 9, "no_worker")])
async def test_queue_wait_is_bounded_and_ends_with_503(alive, seconds, reason):
    harness = QueueHarness(Fleet(places=0, alive=alive))
    waiting = harness.come("x")
    await harness.waiting(1)
    harness.clock.advance(seconds - 0.1)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not waiting.done()
    harness.clock.advance(0.2)
    with pytest.raises(ApiError) as refused:
        await waiting
    assert refused.value.status == 503
    assert refused.value.retry_after is not None
    assert harness.value("queue_refusals_total", reason=reason) == 1


STARTING = StartingWorker(worker_id="w", incarnation="w@2", role="both", model=MODEL, phase="weights", seconds=20.0)


async def waits_on(harness: QueueHarness, waiting: "asyncio.Task[RouteDecision]", seconds: float) -> bool:
    """Whether it still waits so many seconds later."""
    harness.clock.advance(seconds)
    for _ in range(20):
        await asyncio.sleep(0.001)
    return not waiting.done()


async def test_request_waits_while_a_worker_starts():
    harness = QueueHarness(Fleet(alive=False, starts=(STARTING,)), start_s=100.0)
    waiting = harness.come("x")
    await harness.waiting(1)
    for _ in range(9):
        assert await waits_on(harness, waiting, 10.0)
    harness.fleet.starts, harness.fleet.alive = (), True
    await waiting
    assert harness.value("worker_start_wait_seconds_count", outcome="served") == 1
    assert harness.value("worker_start_wait_seconds_sum", outcome="served") == pytest.approx(90.0)


async def test_successor_of_a_lost_worker_is_awaited_without_report():
    harness = QueueHarness(Fleet(alive=False, replaced=True), start_s=100.0)
    waiting = harness.come("x")
    await harness.waiting(1)
    for _ in range(9):
        assert await waits_on(harness, waiting, 11.0)
    assert not await waits_on(harness, waiting, 10.0)
    with pytest.raises(ApiError, match="No worker") as refused:
        await waiting
    assert (refused.value.status, refused.value.retry_after) == (503, 2.0)
    late = harness.come("late")
    await harness.waiting(1)
    assert not await waits_on(harness, late, 9.1), "as without a successor"
    with pytest.raises(ApiError, match="No worker"):
        await late


async def test_worker_lost_while_no_request_waited_is_awaited_afresh():
    """A former loss, during which a request was refused, does not count."""
    harness = QueueHarness(Fleet(alive=False, replaced=True), start_s=100.0)
    first = harness.come("x")
    await harness.waiting(1)
    assert not await waits_on(harness, first, 110.0)
    with pytest.raises(ApiError):
        await first
    for alive in (True, False):
        harness.fleet.alive = alive
        harness.clock.advance(50.0)
        await harness.binding.sync()
    second = harness.come("y")
    await harness.waiting(1)
    assert await waits_on(harness, second, 60.0)
    harness.fleet.alive = True
    await second


async def test_workers_that_return_after_the_queue_is_empty_are_noticed():
    harness = QueueHarness(Fleet(alive=False))
    waiting = harness.come("x")
    await harness.waiting(1)
    await until(lambda: harness.binding.has_lacked_workers_since(harness.clock.now()), 10.0, "the lack is noticed")
    waiting.cancel()
    await harness.waiting(0)
    harness.fleet.alive = True
    harness.clock.advance(1.0)
    await harness.binding.sync()
    harness.clock.advance(1.0)
    arrived = harness.clock.now()
    await harness.come("y")
    assert not harness.binding.has_lacked_workers_since(arrived)


async def test_wait_for_a_start_is_bounded_and_names_the_time_it_takes():
    """However often the worker begins again."""
    harness = QueueHarness(Fleet(alive=False, starts=(STARTING,)), start_s=100.0)
    waiting = harness.come("x")
    await harness.waiting(1)
    for number in range(11):
        harness.fleet.starts = (msgspec.structs.replace(STARTING, incarnation=f"w@{number}"),)
        assert await waits_on(harness, waiting, 9.0)
    assert not await waits_on(harness, waiting, 2.0)
    with pytest.raises(ApiError) as refused:
        await waiting
    assert (refused.value.status, refused.value.retry_after) == (503, pytest.approx(20.0, abs=5.0))
    assert harness.value("worker_start_wait_seconds_count", outcome="refused") == 1


async def test_second_start_of_a_worker_is_waited_for_as_its_first():
    starting = msgspec.structs.replace(STARTING, incarnation=make_view("w").incarnation)
    harness = QueueHarness(Fleet(alive=False, places=2, starts=(starting,)), start_s=100.0)
    first = harness.come("first")
    await harness.waiting(1)
    assert await waits_on(harness, first, 50.0)
    harness.fleet.starts, harness.fleet.alive = (), True
    await first
    harness.clock.advance(80.0)
    harness.fleet.alive = False
    harness.fleet.starts = (msgspec.structs.replace(STARTING, incarnation="w@3", seconds=0.0),)
    second = harness.come("second")
    await harness.waiting(1)
    for _ in range(9):
        assert await waits_on(harness, second, 10.0)
    harness.fleet.alive = True
    await second


async def test_expected_wait_contains_the_start_of_what_is_lacking():
    """Or requests with objectives would wait for a worker that comes too late for them."""
    harness = QueueHarness(Fleet(alive=False, starts=(STARTING,)))
    waiting = harness.come("x")
    await harness.waiting(1)
    assert await waits_on(harness, waiting, 1.0)

    def expected_s() -> float:
        return harness.binding.expected_wait_s(tenant=UNKNOWN, priority=0, prompt_tokens=10)

    assert expected_s() == pytest.approx(STARTING.seconds, abs=2.0)
    harness.fleet.starts, harness.fleet.alive = (), True
    await waiting
    blocked = harness.come("y")
    await harness.waiting(1)
    assert expected_s() < 1.0
    blocked.cancel()


async def test_late_answer_after_a_start_rejects_no_request():
    """In the view before the router can choose it, such as one that has just come."""
    harness = QueueHarness(Fleet(alive=False, places=1, starts=(STARTING,), too_long=0))
    waiting = harness.come("x")
    await harness.waiting(1)
    assert await waits_on(harness, waiting, 100.0)
    harness.fleet.starts, harness.fleet.alive = (), True
    assert await waits_on(harness, waiting, 7.0)
    harness.fleet.too_long = 1000
    harness.clock.advance(1.0)
    await asyncio.wait_for(waiting, 10.0)


async def test_start_that_has_ended_is_waited_for_as_any_worker():
    harness = QueueHarness(Fleet(alive=False, starts=(STARTING,)))
    waiting = harness.come("x")
    await harness.waiting(1)
    assert await waits_on(harness, waiting, 30.0)
    harness.fleet.starts = ()
    assert await waits_on(harness, waiting, 8.9)
    assert not await waits_on(harness, waiting, 0.2)
    with pytest.raises(ApiError, match="No worker"):
        await waiting


async def test_after_a_start_there_is_the_whole_time_for_capacity():
    """What waits behind others when the first worker comes must not be refused at once."""
    harness = QueueHarness(Fleet(alive=False, places=1, starts=(STARTING,)), room_s=60.0)
    tasks = [harness.come(str(number)) for number in range(2)]
    await harness.waiting(2)
    assert await waits_on(harness, tasks[0], 100.0)
    harness.fleet.starts, harness.fleet.alive = (), True
    first = await tasks[0]
    assert await waits_on(harness, tasks[1], 50.0)
    await harness.done(first)
    await tasks[1]


async def test_only_decode_worker_starts_while_others_compute_prompts():
    harness = QueueHarness(Fleet(starts=(STARTING,), too_long=0))
    harness.fleet.workers = lambda: (make_view("p", Role.PREFILL),)
    tasks = [harness.come(str(number)) for number in range(30)]
    await harness.waiting(30)
    assert await waits_on(harness, tasks[-1], 100.0), "more than are tried in a round"
    assert harness.value("num_requests_held") == 30
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_request_that_was_passed_over_goes_to_the_worker_that_comes():
    """It waited for the rest of the half second in which it is not tried again."""
    harness = QueueHarness(Fleet(starts=(STARTING,), too_long=0))
    harness.fleet.workers = lambda: (make_view("p", Role.PREFILL),)
    waiting = harness.come("x")
    await until(lambda: len(harness.fleet.asked) > 1, 10.0, "not tried in a turn")
    harness.fleet.too_long, harness.fleet.workers = 10_000, lambda: (make_view("p", Role.PREFILL), make_view("w"))
    await asyncio.wait_for(waiting, 10.0)


async def test_wait_for_a_new_worker_has_the_whole_timeout():  # [streams-wait]
    harness = QueueHarness(Fleet(places=0))
    waiting = harness.come("x")
    await harness.waiting(1)
    harness.clock.advance(30)
    harness.fleet.alive = False
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not waiting.done()
    harness.fleet.alive, harness.fleet.places = True, 1
    await waiting


async def test_tenant_filling_queue_gets_429_others_keep_slots():
    harness = QueueHarness(Fleet(places=0), seats=4)
    flood = [harness.come(f"a{n}", "a") for n in range(4)]
    await harness.waiting(4)
    alone = harness.come("a4", "a")
    with pytest.raises(ApiError) as refused:
        await alone
    assert refused.value.status == 503, "nobody else waits: it is the fleet that is too small"
    calm = harness.come("b0", "b")
    with pytest.raises(ApiError) as pushed:
        await flood[3]
    assert (pushed.value.status, pushed.value.reason) == (429, "queue_full")
    assert pushed.value.retry_after is not None
    again = harness.come("a5", "a")
    with pytest.raises(ApiError) as refused:
        await again
    assert refused.value.status == 429
    harness.fleet.places = 9
    await asyncio.gather(calm, *flood[:3])


async def test_client_that_leaves_gives_up_its_seat():
    harness = QueueHarness(Fleet(places=0))
    tasks = [harness.come("a"), harness.come("b")]
    await harness.waiting(2)
    tasks[0].cancel()
    await harness.waiting(1)
    harness.fleet.places = 1
    await tasks[1]
    assert (harness.fleet.taken, len(harness.binding.queue)) == (1, 0)


async def test_disconnect_during_routing_leaves_no_reservation():
    harness = QueueHarness(Fleet(places=1))
    holder = await harness.come("holder")
    task = harness.come("x")
    await harness.waiting(1)
    harness.fleet.gate = asyncio.Event()
    asked = len(harness.fleet.asked)
    await until(lambda: len(harness.fleet.asked) > asked, 10.0, "it is asked for")
    await harness.done(holder)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    harness.fleet.gate.set()
    await until(lambda: harness.fleet.taken == 0, 10.0, "it is given back")
    await harness.admission.close()


async def test_surprise_in_one_turn_is_that_requests_alone():
    harness = QueueHarness(Fleet(places=0))

    async def broken() -> RouteDecision:
        harness.fleet.places = 9
        raise RuntimeError("a bug")

    other = harness.come("other")
    await harness.waiting(1)
    with pytest.raises(RuntimeError, match="a bug"):
        await harness.admission.admit(broken, tenant=UNKNOWN, priority=9, prompt_tokens=1)
    await other
    assert len(harness.binding.queue) == 0


async def test_queue_reports_tokens_seconds_and_held_requests():
    harness = QueueHarness(Fleet(places=1))
    first = await harness.come("first", prompt=300)
    second = harness.come("second", prompt=200)
    await harness.waiting(1)
    harness.clock.advance(7.0)
    assert harness.value("waiting_prompt_tokens") == 200
    assert harness.value("oldest_wait_seconds") == 7.0
    assert harness.value("num_requests_held") == 0, "somebody is there, without room"
    assert harness.value("asked_prompt_tokens_total") == 500
    await harness.done(first)
    await second
    assert harness.value("waiting_prompt_tokens") == 0
    assert harness.value("oldest_wait_seconds") == 0.0


async def test_requests_are_held_without_workers_and_served_later():
    harness = QueueHarness(Fleet(places=2), worker_s=600.0)
    harness.fleet.alive = False
    tasks = [harness.come(str(n)) for n in range(2)]
    await harness.waiting(2)
    await until(lambda: harness.value("num_requests_held") == 2, 10.0, "both are held")
    harness.clock.advance(300.0)
    harness.fleet.alive = True
    await asyncio.gather(*tasks)
    assert harness.value("num_requests_held") == 0


async def test_request_behind_a_full_adapter_has_a_worker_all_the_same():
    """It is not tried, and waits for capacity, not for a worker."""
    adapter = ServedAdapter(name="a", digest="aa" * 16, rank=1, root="")
    fleet = Fleet(places=0)
    harness = QueueHarness(fleet)
    lane = Lane(adapter=b"\xaa" * 16, ask_apart=lambda _: fleet.ask("apart", 1))
    entries = []
    for name in ("first", "second"):
        answer: asyncio.Future[RouteDecision] = asyncio.get_running_loop().create_future()
        ask = partial(fleet.ask, name, 1)
        entry = harness.binding.entry(ask, answer, tenant=UNKNOWN, priority=0, prompt_tokens=1, lane=lane)
        assert await harness.binding.arrive(entry) is None
        entries.append(entry)
    assert not await harness.binding.turn()
    assert [entry.verdict for entry in entries] == [Verdict.NO_WORKER] * 2
    fleet.workers = lambda: (make_view("w", adapters={"a": adapter}),)
    fleet.asked.clear()
    assert not await harness.binding.turn()
    assert [entry.verdict for entry in entries] == [Verdict.NO_ROOM] * 2
    assert fleet.asked == ["first"]


async def test_skipped_request_of_an_adapter_claims_no_place():
    """Its workers accept no requests now: a place that another gateway offers does not help it."""
    served = {"a": ServedAdapter(name="a", digest="aa" * 16, rank=1, root="")}
    fleet = Fleet(too_long=0)
    fleet.workers = lambda: (make_view("w", adapters=served),)
    harness = QueueHarness(fleet)
    answer: asyncio.Future[RouteDecision] = asyncio.get_running_loop().create_future()
    lane = Lane(adapter=b"\xaa" * 16, ask_apart=lambda _: fleet.ask("apart", 1))
    ask = partial(fleet.ask, "first", 1)
    entry = harness.binding.entry(ask, answer, tenant=UNKNOWN, priority=0, prompt_tokens=1, lane=lane)
    assert await harness.binding.arrive(entry) is None
    for _ in range(2):
        assert not await harness.binding.turn()
        assert entry.verdict is Verdict.NO_WORKER
    assert fleet.asked == ["first"] * 2
    assert harness.value("num_requests_held") == 1


async def test_expected_wait_is_that_of_the_prompts_before_it():
    fleet = Fleet(places=0)
    harness = QueueHarness(fleet)
    tenant = Tenant(name="b", sha256=())

    def expected(priority: int = 0) -> float:
        return harness.binding.expected_wait_s(tenant=tenant, priority=priority, prompt_tokens=100)

    assert expected() == 0.0
    tasks = [harness.come("first", "b", prompt=100), harness.come("second", "b", prompt=300)]
    await harness.waiting(2)
    assert expected() == 0.0  # no rate is known
    harness.binding.prefill_rate = lambda: 200.0
    assert expected() == 2.0
    assert expected(priority=1) == 0.0
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await harness.admission.close()


async def test_time_without_a_queue_is_no_pace():
    fleet = Fleet(places=0)
    harness = QueueHarness(fleet)
    early = [harness.come(name) for name in ("a", "b", "c")]
    await harness.waiting(3)
    fleet.places = 9
    harness.admission.freed()
    for task in early:
        await task
    harness.clock.advance(3_600.0)
    fleet.places = 0
    late = harness.come("late")
    await harness.waiting(1)
    assert harness.binding.expected_wait_s(tenant=UNKNOWN, priority=0, prompt_tokens=100) == 0.0
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    await harness.admission.close()


async def test_lengths_and_gaps_of_arrivals_are_counted():
    harness = QueueHarness(Fleet(places=3))
    for name, gap_s in (("a", 0.0), ("b", 2.0), ("c", 3.0)):
        harness.clock.advance(gap_s)
        await harness.come(name, prompt=1000)
    assert harness.value("arrival_gap_square_seconds_total") == 2.0**2 + 3.0**2
    assert harness.value("uncached_prompt_tokens_sum") == 3000
    assert harness.value("uncached_prompt_tokens_bucket", le="1024.0") == 3


async def test_request_rejected_before_the_queue_is_demand():
    harness = QueueHarness(Fleet())
    harness.binding.note_rejected(700)
    assert harness.value("asked_prompt_tokens_total") == 700
    assert harness.value("uncached_prompt_tokens_count") == 0


@pytest.mark.parametrize("waiting", [20, 500])
async def test_turns_and_arrivals_look_at_few_of_a_long_queue(monkeypatch, waiting):
    """Requests of another tenant share the event loop with a queue of a thousand choices."""
    looked = Counter()

    def counted(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def counting(*args: object) -> object:
            looked[name] += 1
            return method(*args)

        monkeypatch.setattr(kind, name, counting)

    harness = QueueHarness(Fleet(places=1), seats=1000, poll_s=30.0)
    first = await harness.come("first", "flood")
    lane = Lane(adapter=b"", ask_apart=lambda avoided: harness.fleet.ask(str(avoided), 100))
    tasks = [
        asyncio.create_task(
            harness.admission.admit(
                lambda: harness.fleet.ask("flood", 100),
                tenant=Tenant(name="flood", sha256=()),
                priority=0,
                prompt_tokens=100,
                lane=lane,
            )
        )
        for _ in range(waiting)
    ]
    await harness.waiting(waiting)
    await until(lambda: len(harness.fleet.asked) > 1, 10.0, "the queue has had a turn")
    counted(BlockedLanes, "hold")
    counted(QueueTimeouts, "until_capacity")
    for _ in range(10):
        await harness.binding.turn()
    new_request = harness.come("newcomer", "flood")
    await harness.waiting(waiting + 1)
    assert looked["hold"] <= 20
    assert looked["until_capacity"] == 0
    harness.clock.advance(harness.binding.policy.poll_s)
    await harness.binding.turn()
    assert looked["until_capacity"] == waiting + 1, "timeouts are looked at after a while"
    for task in (new_request, *tasks):
        task.cancel()
    await asyncio.gather(new_request, *tasks, return_exceptions=True)
    await harness.done(first)
    await harness.admission.close()
