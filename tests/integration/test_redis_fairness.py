"""A tenant that floods several gateways does not double another's 99th percentile [fair-tenants].

The gateways' own queues and counters, and the real Redis between them, in virtual time: a fleet with a number of
places, which gateways ask for in random order. Counters are reported as often as a gateway reports them.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from tandem_services.common.redis_client import RedisAddress, RedisClient
from tandem_services.gateway.queueing.fair_queue import SYNC_S, FairQueue, SharedCounters, Waiting
from tandem_services.router.keys import Keys
from tandem_services.router.redis_functions import FunctionLibrary
from tandem_services.router.shared_state import FairBoard
from tandem_services.router.usage_counters import OUTPUT_WEIGHT, VirtualCounters, prompt_cost
from tandem_testing.router_builders import PATIENT_S

GATEWAYS, PLACES, SECONDS = 3, 16, 60.0
PROMPT, OUTPUT, SERVICE_S = 500, 100, 1.0


@dataclass(kw_only=True, eq=False, slots=True)
class Job(Waiting):
    service_s: float


@dataclass(kw_only=True)
class Gateway:
    """Its queue, and counters that a board adds up where there is one."""

    shared: SharedCounters
    queue: FairQueue[Job] = field(init=False)

    def __post_init__(self) -> None:
        self.queue = FairQueue(seats=1024, counters=self.shared.counters)

    def admit(self, now: float) -> Job | None:
        job = self.queue.next(now)
        if job is not None:
            self.shared.charge(job.tenant, prompt_cost(PROMPT, 0))
            self.queue.remove(job)
        return job


@dataclass(frozen=True, order=True, slots=True)
class Arrival:
    at: float
    gateway: int
    tenant: str
    service_s: float


def arrivals(tenant: str, gateways: Sequence[int], *, rate: float) -> list[Arrival]:
    random, now, found = Random(tenant), 0.0, list[Arrival]()
    while (now := now + random.expovariate(rate)) < SECONDS:
        found.append(Arrival(now, random.choice(gateways), tenant, SERVICE_S * random.uniform(0.5, 1.5)))
    return found


async def served(gateways: Sequence[Gateway], work: list[Arrival]) -> dict[str, list[float]]:
    """Seconds from arrival to end, by tenant, of what has ended before the last arrival and of what ran then."""
    random = Random(1)
    todo, running = sorted(work), list[tuple[float, int, float, str]]()
    taken: dict[str, list[float]] = {arrival.tenant: [] for arrival in todo}
    next_sync, position = 0.0, 0
    while position < len(todo) or running:
        due = todo[position].at if position < len(todo) else float("inf")
        ended = running[0][0] if running else float("inf")
        now = min(due, ended, next_sync)
        if now == next_sync:
            next_sync += SYNC_S
            for gateway in gateways:
                await gateway.shared.sync()
        elif now == ended:
            _, number, arrived, tenant = heapq.heappop(running)
            gateways[number].shared.charge(tenant, OUTPUT_WEIGHT * OUTPUT)
            taken[tenant].append(now - arrived)
        else:
            arrival = todo[position]
            position += 1
            job = Job(tenant=arrival.tenant, weight=1.0, priority=0, arrived=now, service_s=arrival.service_s)
            gateways[arrival.gateway].queue.add(job)
        while len(running) < PLACES and position < len(todo):
            # A place that falls free goes to the gateway that asks first.
            first = next((g for g in random.sample(range(len(gateways)), len(gateways)) if gateways[g].queue), None)
            if first is None or (taken_in := gateways[first].admit(now)) is None:
                break
            heapq.heappush(running, (now + taken_in.service_s, first, taken_in.arrived, taken_in.tenant))
    return taken


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))]


@pytest.fixture
async def gateways(server):
    server.wipe()
    clients = [RedisClient(RedisAddress(url=server.url), timeout_s=PATIENT_S) for _ in range(GATEWAYS)]
    boards = [FairBoard(library=FunctionLibrary(client), keys=Keys("default")) for client in clients]
    yield [Gateway(shared=SharedCounters(counters=VirtualCounters(), board=board)) for board in boards]
    for client in clients:
        await client.close()


async def test_tenant_flooding_all_gateways_does_not_double_other_p99(gateways):  # [fair-tenants]
    steady = arrivals("steady", range(GATEWAYS), rate=2.0)
    flood = arrivals("flood", range(GATEWAYS), rate=10 * PLACES / SERVICE_S)
    alone = await served([without_redis() for _ in range(GATEWAYS)], steady)
    beside = await served(gateways, steady + flood)
    assert len(beside["steady"]) >= 0.95 * len(alone["steady"]), "what had no time to end may be missing, no more"
    assert p99(beside["steady"]) <= 2 * p99(alone["steady"])


async def test_tenant_at_several_gateways_has_lower_priority_at_each(gateways):  # [fair-tenants]
    """One tenant wants all there is of one gateway, the other of each. The first gets all that its gateway gets."""
    work = arrivals("narrow", [0], rate=2 * PLACES / SERVICE_S) + arrivals(
        "wide", range(GATEWAYS), rate=2 * GATEWAYS * PLACES / SERVICE_S
    )
    shared = await served(gateways, work)
    apart = await served([without_redis() for _ in range(GATEWAYS)], work)
    total = sum(map(len, shared.values()))
    assert len(shared["narrow"]) == pytest.approx(total / GATEWAYS, rel=0.1)
    assert len(apart["narrow"]) == pytest.approx(total / GATEWAYS / 2, rel=0.2)


def without_redis() -> Gateway:
    return Gateway(shared=SharedCounters(counters=VirtualCounters()))
