"""A tenant that floods does not raise another's 99th percentile more than twofold [fair-tenants].

A simulation in virtual time of a fleet with a number of places and the gateway's real queue in front of it: no process,
no clock, no chance. A request holds its place for its prompt and its output. The prompt is charged when it is admitted,
as a gateway does; all of the output when it ends, which is later than a gateway does.
"""

import heapq
from dataclasses import dataclass, field
from random import Random

import pytest

from tandem_services.gateway.queueing.fair_queue import FairQueue, Waiting
from tandem_services.router.usage_counters import OUTPUT_WEIGHT, VirtualCounters, prompt_cost

PREFILL_S, STEP_S = 0.0002, 0.01
"""Per prompt token and per output token."""
PLACES = 32


@dataclass(order=True)
class Arrival:
    at: float
    tenant: str
    prompt: int = field(compare=False)
    output: int = field(compare=False)

    @property
    def service_s(self) -> float:
        return self.prompt * PREFILL_S + self.output * STEP_S


@dataclass(kw_only=True, eq=False, slots=True)
class Job(Waiting):
    arrival: Arrival


class ArrivalOrder(VirtualCounters):
    """What a gateway without fairness does: all counters stay equal, so the first request to arrive goes first."""

    def charge(self, tenant: str, cost: float) -> None:
        del tenant, cost


def arrivals(tenant: str, *, rate: float, seconds: float, prompt: int, output: int, seed: int) -> list[Arrival]:
    random, now, found = Random(f"{tenant}{seed}"), 0.0, []
    while (now := now + random.expovariate(rate)) < seconds:
        size = random.uniform(0.5, 1.5)
        found.append(Arrival(now, tenant, round(prompt * size), round(output * size)))
    return found


def simulate(work: list[Arrival], counters: VirtualCounters, *, seats: int = 1024) -> dict[str, list[float]]:
    """Seconds from arrival to end, by tenant, of all that were served."""
    queue: FairQueue[Job] = FairQueue(seats=seats, counters=counters)
    todo, running = sorted(work), list[tuple[float, Arrival]]()
    taken: dict[str, list[float]] = {}
    position = 0
    while position < len(todo) or running:
        due = todo[position].at if position < len(todo) else float("inf")
        if running and running[0][0] <= due:
            now, ended = heapq.heappop(running)
            counters.charge(ended.tenant, OUTPUT_WEIGHT * ended.output)
            taken.setdefault(ended.tenant, []).append(now - ended.at)
        else:
            now, arrival = due, todo[position]
            position += 1
            queue.add(Job(tenant=arrival.tenant, weight=1.0, priority=0, arrived=now, arrival=arrival))
        while len(running) < PLACES and (job := queue.next(now)) is not None:
            counters.charge(job.tenant, prompt_cost(job.arrival.prompt, 0))
            queue.remove(job)
            heapq.heappush(running, (now + job.arrival.service_s, job.arrival))
    return taken


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))]


def steady(seed: int) -> list[Arrival]:
    return arrivals("steady", rate=1.0, seconds=300, prompt=500, output=100, seed=seed)


def flood(seed: int) -> list[Arrival]:
    """Ten times what the fleet can do."""
    capacity = PLACES / (500 * PREFILL_S + 100 * STEP_S)
    return arrivals("flood", rate=10 * capacity, seconds=300, prompt=500, output=100, seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_flood_does_not_double_anothers_p99(seed):
    alone = simulate(steady(seed), VirtualCounters())["steady"]
    beside = simulate(steady(seed) + flood(seed), VirtualCounters())
    assert len(beside["steady"]) == len(alone), "none of the steady tenant's requests may be refused"
    assert p99(beside["steady"]) <= 2 * p99(alone)


def test_arrival_order_lets_a_flood_delay_a_steady_tenant():
    alone = simulate(steady(0), ArrivalOrder())["steady"]
    beside = simulate(steady(0) + flood(0), ArrivalOrder())["steady"]
    assert p99(beside) > 10 * p99(alone)


def test_fairness_costs_no_throughput():
    work = steady(0) + flood(0)
    fair, plain = simulate(work, VirtualCounters()), simulate(work, ArrivalOrder())
    served = [sum(map(len, taken.values())) for taken in (fair, plain)]
    assert served[0] >= 0.99 * served[1]


def test_two_saturating_tenants_share_capacity_by_tokens():
    """One sends prompts of four times the length: it gets a quarter of the requests."""
    small = arrivals("small", rate=300, seconds=300, prompt=250, output=50, seed=1)
    large = arrivals("large", rate=300, seconds=300, prompt=1000, output=200, seed=1)
    taken = simulate(small + large, VirtualCounters(), seats=400)
    assert len(taken["small"]) / len(taken["large"]) == pytest.approx(4.0, rel=0.1)


def test_many_floods_leave_each_its_share():
    tenants = [f"t{number}" for number in range(8)]
    work = [
        arrival
        for number, tenant in enumerate(tenants)
        for arrival in arrivals(tenant, rate=20 * (number + 1), seconds=120, prompt=500, output=100, seed=2)
    ]
    served = [len(done) for done in simulate(work, VirtualCounters()).values()]
    assert max(served) <= 1.1 * min(served)
