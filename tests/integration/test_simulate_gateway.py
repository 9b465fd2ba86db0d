"""The queue of a simulated gateway is the gateway's: same order, same waits, same refusals; fair, and repeatable."""

import asyncio
import json
import selectors
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

import msgspec
import pytest

from tandem_lab.simulate.clock import EventQueue, SimulatedRedis
from tandem_lab.simulate.fleet import Fleet, FleetShape
from tandem_lab.simulate.gateway import Client, Gateway, GatewayShape, QueueNotes
from tandem_lab.simulate.prefix_fetch import ServiceTimes
from tandem_lab.simulate.replay import Replay
from tandem_lab.simulate.report import PolicyReport
from tandem_lab.simulate.requests import SimulatedRequest, simulated_requests
from tandem_lab.simulate.run import Simulation
from tandem_lab.traces import TRACE_BLOCK, TraceRow
from tandem_services.cli.main import main
from tandem_services.common.errors import ApiError
from tandem_services.common.redis_client import RedisAddress
from tandem_services.gateway.queueing.admission import Admission
from tandem_services.gateway.queueing.fair_queue import FairQueue, SharedCounters
from tandem_services.gateway.queueing.late_binding import LateBinding
from tandem_services.gateway.queueing.queue_timeouts import AdmissionPolicy
from tandem_services.gateway.queueing.shared_route import SharedRoute
from tandem_services.router.cost import NO_ROOM_S
from tandem_services.router.decision import NoWorkersError, RouteDecision, RouteQuery, ScoreTerm, WorkerView
from tandem_services.router.keys import HEARTBEAT_S
from tandem_services.router.policies import PolicyNames
from tandem_services.router.router import RouterCounters
from tandem_services.router.scoring import DECODE_ROOM
from tandem_services.router.usage_counters import VirtualCounters
from tandem_testing.router_builders import make_choice, make_view

POLICY = AdmissionPolicy(room_s=4.0, worker_s=1.5)
SHAPE = GatewayShape(seats=6, policy=POLICY)
AWAY = (30.0, 34.0)
"""When there is no worker."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time jumps to the next timer when there is nothing to do."""

    def __init__(self) -> None:
        self._virtual = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._virtual

    now = time

    def jump(self, seconds: float) -> None:
        self._virtual += seconds


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None):
        if timeout is not None and timeout > 0:
            self._loop.jump(timeout)
        return super().select(0)


@dataclass
class Places:
    """A router of one worker with three places."""

    clock: "VirtualLoop | EventQueue"
    taken: int = 0
    counters: RouterCounters = field(default_factory=RouterCounters)

    def workers(self) -> tuple[WorkerView, ...]:
        return () if AWAY[0] <= self.clock.now() < AWAY[1] else (make_view("w"),)

    async def refresh(self) -> None: ...

    async def choose(self, query: RouteQuery) -> RouteDecision:
        if not self.workers():
            raise NoWorkersError("nobody", retry_after=2.0)
        terms = (ScoreTerm(DECODE_ROOM, NO_ROOM_S if self.taken >= 3 else 0.0),)
        self.taken += 1
        return make_choice(query.request_id, make_view("w"), terms=terms)

    async def release(self, choice: RouteDecision) -> None:
        del choice
        self.taken -= 1


Story = list[tuple[float, str, int, int]]
"""When, what, of which request, and of which choice of it; 0 for a refusal, which is of all."""


def crowd(seed: int, choices: int) -> list[SimulatedRequest]:
    """Two tenants, one of which asks for much at times, several priorities, and some requests of several choices."""
    random, at, rows = Random(seed), 0.0, []
    for number in range(120):
        at += random.expovariate(6.0 if number % 40 < 25 else 0.8) * (1 + choices) / 2
        prompt = random.randint(1, 4 * TRACE_BLOCK)
        rows.append(
            TraceRow(
                at=at,
                prompt_tokens=prompt,
                output_tokens=random.randint(1, 200),
                blocks=tuple(range(-(-prompt // TRACE_BLOCK))),
                tenant=random.choice(("busy", "busy", "busy", "calm")),
                priority=random.choice((0, 0, 0, 1)),
                choices=random.choice((1, 1, 1, choices)),
            )
        )
    return simulated_requests(rows, limit=None, speed=1.0)


def service_s(request: SimulatedRequest) -> float:
    return 0.3 + request.output_tokens * 0.00711


async def in_a_gateway(requests: list[SimulatedRequest], loop: VirtualLoop) -> tuple[Story, QueueNotes]:
    """The product's `Admission`, on an event loop."""
    places, notes, counters, story = Places(loop), QueueNotes(), VirtualCounters(), []
    running: list[asyncio.Task[None]] = []
    binding = LateBinding(
        chooser=places,
        clock=loop,
        queue=FairQueue(seats=SHAPE.seats, counters=counters),
        counters=SharedCounters(counters=counters),
        observer=notes,
        policy=POLICY,
    )
    admission = Admission(binding=binding)

    async def client(request: SimulatedRequest) -> None:
        await asyncio.sleep(request.at)
        route = SharedRoute() if request.choices > 1 else None
        tasks = [asyncio.create_task(one(request, number, route)) for number in range(request.choices)]
        try:
            # As `Generator` does: the first choice that fails ends those that wait.
            for task in asyncio.as_completed(tasks):
                await task
        except ApiError:
            story.append((loop.now(), "refused", request.number, 0))
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def one(request: SimulatedRequest, number: int, route: SharedRoute | None) -> None:
        query = RouteQuery(request_id=f"{request.number}-{number}", model="m", token_ids=())
        alone = partial(places.choose, query)
        choice = await admission.admit(
            alone if route is None else partial(route.choose, places, query, places.choose, alone),
            tenant=request.tenant,
            priority=request.priority,
            prompt_tokens=request.prompt_tokens,
        )
        story.append((loop.now(), "admitted", request.number, number))
        running.append(asyncio.create_task(served(request, choice)))

    async def served(request: SimulatedRequest, choice: RouteDecision) -> None:
        await asyncio.sleep(service_s(request))
        await places.release(choice)
        binding.charge_output(request.tenant, request.output_tokens)
        admission.freed()

    await asyncio.gather(*(client(request) for request in requests))
    await asyncio.gather(*running)
    await admission.close()
    assert places.taken == 0
    return story, notes


async def in_the_simulator(requests: list[SimulatedRequest], redis: RedisAddress) -> tuple[Story, QueueNotes]:
    events, story = EventQueue(), []
    simulated = SimulatedRedis(address=redis, cluster="queue", events=events)
    places = Places(events)
    gateway = Gateway(places, Fleet(FleetShape(both=1, cache_blocks=99, block_tokens=TRACE_BLOCK), simulated), SHAPE)

    def client(request: SimulatedRequest) -> Client:
        async def admitted(number: int, choice: RouteDecision) -> None:
            story.append((events.now(), "admitted", request.number, number))
            events.after(service_s(request), lambda: gateway.ended(request, choice))

        return Client(admitted=admitted, refused=lambda _: story.append((events.now(), "refused", request.number, 0)))

    for request in requests:
        events.at(request.at, lambda request=request: gateway.arrive(request, client(request), range(request.choices)))
    try:
        await events.run()
    finally:
        await simulated.client.close()
    assert places.taken == 0
    return story, gateway.notes


@pytest.mark.parametrize("choices", [1, 5])
@pytest.mark.parametrize("seed", range(5))
def test_simulated_admissions_equal_those_of_a_gateway(server, seed, choices):
    requests = crowd(seed, choices)
    loop = VirtualLoop()
    try:
        story, notes = loop.run_until_complete(in_a_gateway(requests, loop))
    finally:
        loop.close()
    reported, simulated = asyncio.run(in_the_simulator(requests, RedisAddress(url=server.url)))
    assert [event[1:] for event in sorted(reported)] == [event[1:] for event in sorted(story)]
    assert [event[0] for event in sorted(reported)] == pytest.approx([event[0] for event in sorted(story)], abs=1e-6)
    assert simulated.refusals == notes.refusals
    assert sorted(simulated.waits) == pytest.approx(sorted(notes.waits), abs=1e-6)
    assert simulated.refusals.total() > 5
    assert sum(wait > 0 for wait in simulated.waits) > 20


class Outdated(Places):
    """Names a worker that has gone, the first time it is asked, and then the one that is there."""

    fleet: Fleet
    asked: int = 0

    async def choose(self, query: RouteQuery) -> RouteDecision:
        choice = await super().choose(query)
        self.asked += 1
        (there,) = self.fleet.workers.values()
        return choice if self.asked == 1 else replace(choice, decode=self.fleet.view(there))


async def test_simulated_request_of_removed_worker_is_retried(server):
    server.command("FLUSHALL")
    simulated = SimulatedRedis(address=RedisAddress(url=server.url), cluster="gone", events=EventQueue())
    shape = FleetShape(both=1, cache_blocks=99, block_tokens=TRACE_BLOCK)
    router = Outdated(simulated.events)
    router.fleet = Fleet(shape, simulated)
    requests = simulated_requests([row(0.5, 0, 4, "")], limit=None, speed=1.0)
    try:
        outcome = await Replay(requests, router.fleet, [router], shape, lambda: None).to_the_end()
    finally:
        await simulated.client.close()
    assert (len(outcome.served), router.asked, router.taken) == (1, 2, 0)
    assert outcome.served[0].ttft_s > HEARTBEAT_S


def row(at: float, first_block: int, blocks: int, tenant: str) -> TraceRow:
    own = tuple(range(first_block, first_block + blocks))
    return TraceRow(at=at, prompt_tokens=blocks * TRACE_BLOCK, output_tokens=5, blocks=own, tenant=tenant)


def flood_and_calm(*, flood: str = "flood", calm: str = "calm") -> list[TraceRow]:
    """One sends a hundred prompts within ten seconds, which take forty; the other one each three seconds."""
    rows = [row(n * 0.1, n * 10, 4, flood) for n in range(100)]
    return rows + [row(n * 3.0 + 0.05, 5000 + n * 10, 2, calm) for n in range(14)]


def simulation(rows: list[TraceRow], **gateways) -> Simulation:
    return Simulation(
        requests=simulated_requests(rows, limit=None, speed=1.0),
        shape=FleetShape(both=2, cache_blocks=500, block_tokens=TRACE_BLOCK, times=ServiceTimes(prefill_rate=2560.0)),
        policies={"locality": PolicyNames()},
        local_prefill_tokens=0,
        seed=0,
        gateways=GatewayShape(**gateways),
    )


async def replayed(server, whole: Simulation) -> PolicyReport:
    server.command("FLUSHALL")
    return (await whole.run(RedisAddress(url=server.url), lambda _: None)).policies["locality"]


@pytest.mark.parametrize("gateways", [1, 3])
async def test_flood_delays_itself_and_not_another_tenant(server, gateways):
    fair = await replayed(server, simulation(flood_and_calm(), gateways=gateways))
    calm, flood = fair.tenants["calm"], fair.tenants["flood"]
    assert (calm.requests, calm.refused, flood.requests + flood.refused) == (14, 0, 100)
    assert calm.ttft_ms.p50 * 4 < flood.ttft_ms.p50
    # No tenants: the first request to arrive goes first.
    unnamed = await replayed(server, simulation(flood_and_calm(flood="", calm=""), gateways=gateways))
    assert unnamed.tenants == {}
    alike = await replayed(server, simulation(flood_and_calm(calm="flood"), gateways=gateways))
    assert alike.ttft_ms == unnamed.ttft_ms
    assert calm.ttft_ms.max < alike.ttft_ms.max / 3


async def test_simulated_full_queue_rejects_with_reason_in_report(server):
    report = await replayed(server, simulation(flood_and_calm(), seats=10))
    # Requests of the calm tenant go to workers without a seat, so that they push out none of the flood.
    assert report.refusals == {"full": report.refused}
    assert report.refused > 20
    assert report.tenants["calm"].refused == 0
    late = await replayed(server, simulation(flood_and_calm(), policy=AdmissionPolicy(room_s=5.0)))
    assert late.refusals == {"no_room": late.refused}
    assert late.refused > 0
    assert late.gateway_wait_ms.max < 5200


async def test_choices_are_served_each_and_reported_as_one_request(server):
    """Each takes a seat and a place; what the report counts as a request has all of them."""
    rows = [replace(row(0.0, 0, 4, "flood"), choices=100), *(row(n * 0.2, 900, 2, "calm") for n in range(5))]
    report = await replayed(server, simulation(rows))
    flood, calm = report.tenants["flood"], report.tenants["calm"]
    assert (flood.requests, flood.prompt_tokens, flood.output_tokens) == (1, 4 * TRACE_BLOCK, 500)
    assert (calm.requests, calm.output_tokens) == (5, 25)
    assert sum(report.placements.values()) == 105
    small = simulation(rows, seats=2)
    full = await replayed(server, replace(small, shape=replace(small.shape, max_sequences=8)))
    assert full.tenants["flood"].refused == 1
    assert full.requests + full.refused == 6
    assert full.refusals["full"] > 50, "a request that is refused has many choices that are"


async def test_equal_seeds_give_equal_reports_with_several_gateways(server):
    first, second = [await replayed(server, simulation(flood_and_calm(), gateways=3)) for _ in range(2)]
    assert msgspec.json.encode(first) == msgspec.json.encode(second)


def write_trace(path, rows: list[TraceRow]) -> None:
    lines = [
        {
            "timestamp": each.at * 1000,
            "input_length": each.prompt_tokens,
            "output_length": each.output_tokens,
            "hash_ids": each.blocks,
            "tenant": each.tenant,
        }
        for each in rows
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def key_file(path, *names: str, **weights: float):
    entries = [
        {"name": name, "sha256": [f"{number:064x}"], "weight": weights.get(name, 1.0)}
        for number, name in enumerate(names)
    ]
    path.write_text(json.dumps({"keys": entries}))
    return path


COMMAND = ("--workers", "2", "--cache-blocks", "500", "--prefill-rate", "2560", "--policy", "locality", "--json")


@pytest.mark.usefixtures("server")
def test_weights_are_those_of_the_key_file(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    rows = [row(n * 0.05, n * 20 + half * 10, 4, name) for n in range(40) for half, name in enumerate(("a", "b"))]
    write_trace(trace, rows)
    keys = key_file(tmp_path / "keys.json", "a", "b", a=8.0)
    assert main(["simulate", "--trace", str(trace), *COMMAND, "--api-keys", str(keys)]) == 0
    tenants = json.loads(capsys.readouterr().out)["policies"]["locality"]["tenants"]
    assert tenants["a"]["ttft_ms"]["mean"] < tenants["b"]["ttft_ms"]["mean"] * 0.75


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--gateways", "65"], "1 to 64 gateways"),
        (["--api-keys", "absent.json"], "absent.json"),
        (["--api-keys", "KEYS"], "no entry for tenant calm"),
    ],
)
def test_bad_flag_is_named_before_anything_starts(tmp_path, capsys, flags, reason):
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, flood_and_calm())
    keys = key_file(tmp_path / "keys.json", "flood")
    assert main(["simulate", "--trace", str(trace), *[str(keys) if flag == "KEYS" else flag for flag in flags]]) == 2
    assert reason in capsys.readouterr().err
