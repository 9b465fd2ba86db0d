"""A tenant that is alone at one of several gateways gets no more for it, and neither stalls the others nor is stalled.

`tandem simulate`: the gateways' own queues, the router and a real Redis. A flood keeps one gateway busy with as much as
the fleet can do and more; another tenant asks now and then, at the other gateway.
"""

from random import Random

import pytest

from tandem_lab.simulate.fleet import FleetShape
from tandem_lab.simulate.gateway import GatewayShape
from tandem_lab.simulate.prefix_fetch import ServiceTimes
from tandem_lab.simulate.replay import Outcome, replay
from tandem_lab.simulate.requests import SimulatedRequest, simulated_requests
from tandem_lab.traces import TRACE_BLOCK, TraceRow
from tandem_services.common.redis_client import RedisAddress
from tandem_services.gateway.queueing import fair_queue
from tandem_services.gateway.queueing.late_binding import LateBinding
from tandem_services.router.policies import PolicyNames

SECONDS = 24.0
PLACES = 8
SHAPE = FleetShape(
    both=2,
    cache_blocks=400,
    block_tokens=TRACE_BLOCK,
    max_sequences=PLACES // 2,
    times=ServiceTimes(prefill_rate=20_000.0, decode_steps=((1, 0.02),)),
)
OUTPUT = 50
SERVICE_S = 1.0
"""Of one request: its steps."""


def arrivals(tenant: str, rate: float, *, first_block: int, priority: int = 0) -> list[TraceRow]:
    random, at, rows = Random(tenant), 0.0, list[TraceRow]()
    while (at := at + random.expovariate(rate)) < SECONDS:
        rows.append(
            TraceRow(
                at=at,
                prompt_tokens=TRACE_BLOCK,
                output_tokens=round(OUTPUT * random.uniform(0.5, 1.5)),
                blocks=(first_block + len(rows),),
                tenant=tenant,
                priority=priority,
            )
        )
    return rows


def flood(rate: float = 2 * PLACES / SERVICE_S, name: str = "flood", first_block: int = 0) -> list[TraceRow]:
    return arrivals(name, rate, first_block=first_block)


def calm(priority: int = 0) -> list[TraceRow]:
    return arrivals("calm", 0.5, first_block=100_000, priority=priority)


def requests_of(*crowds: list[TraceRow], apart: bool = True) -> list[SimulatedRequest]:
    rows = [row for crowd in crowds for row in crowd]
    return simulated_requests(rows, limit=None, speed=1.0, apart=apart)


async def run(server, requests: list[SimulatedRequest], *, gateways: int = 2) -> Outcome:
    server.command("FLUSHALL")
    return await replay(
        requests,
        SHAPE,
        redis=RedisAddress(url=server.url),
        cluster="lone",
        policies=PolicyNames(),
        local_prefill_tokens=0,
        seed=1,
        on_served=lambda: None,
        gateways=GatewayShape(gateways=gateways, seats=4096),
    )


def seconds_of(outcome: Outcome, tenant: str) -> list[float]:
    return sorted(served.e2e_s for served in outcome.served if served.request.tenant.name == tenant)


def p99(seconds: list[float]) -> float:
    return seconds[int(0.99 * (len(seconds) - 1))]


def served_by(outcome: Outcome, at: float) -> int:
    return sum(served.last <= at for served in outcome.served)


async def test_flood_at_another_gateway_does_not_double_ones_p99(server):  # [fair-tenants]
    alone = await run(server, requests_of(calm()))
    beside = await run(server, requests_of(flood(), calm()))
    one_queue = await run(server, requests_of(flood(), calm()), gateways=1)
    assert len(seconds_of(beside, "calm")) == len(seconds_of(alone, "calm")) == len(calm())
    assert p99(seconds_of(beside, "calm")) <= 2 * p99(seconds_of(alone, "calm"))
    # What is left to others is not left empty for long: as much is served as by one queue, within a tenth.
    assert served_by(beside, SECONDS) >= 0.9 * served_by(one_queue, SECONDS)


async def test_flood_without_yielding_doubles_p99(server, monkeypatch):
    monkeypatch.setattr(fair_queue.HeadYield, "yields", lambda *_: False)
    alone = await run(server, requests_of(calm()))
    beside = await run(server, requests_of(flood(), calm()))
    assert seconds_of(beside, "calm")[len(calm()) // 2] > 5 * p99(seconds_of(alone, "calm"))


async def test_two_floods_at_a_gateway_each_share_the_fleet(server):
    """One sends twice what the fleet can do, the other four times."""
    outcome = await run(server, requests_of(flood(), flood(4 * PLACES / SERVICE_S, "other", 50_000)))
    one_queue = await run(server, requests_of(flood(), flood(4 * PLACES / SERVICE_S, "other", 50_000)), gateways=1)
    shares = [
        sum(each.request.tenant.name == name and each.last <= SECONDS for each in outcome.served)
        for name in ("flood", "other")
    ]
    assert shares[0] == pytest.approx(shares[1], rel=0.15)
    assert served_by(outcome, SECONDS) >= 0.9 * served_by(one_queue, SECONDS)


async def test_gateways_that_share_every_tenant_serve_as_much_as_one(server):
    """As a Service spreads clients: no gateway yields for long."""
    spread = await run(server, requests_of(flood(), calm(), apart=False), gateways=3)
    one_queue = await run(server, requests_of(flood(), calm()), gateways=1)
    assert served_by(spread, SECONDS) >= 0.95 * served_by(one_queue, SECONDS)
    assert p99(seconds_of(spread, "calm")) <= 1.5 * p99(seconds_of(one_queue, "calm")) + fair_queue.YIELD_S


async def test_queue_head_of_stalled_gateway_costs_bounded_capacity(server, monkeypatch):
    """The other gateway takes no turns, and reports a waiting request all the time."""
    turn = LateBinding.turn

    async def stopped(self: LateBinding) -> bool:
        return False if self.counters.gateway == "1" and self.clock.now() < SECONDS else await turn(self)

    free = await run(server, requests_of(flood()))
    monkeypatch.setattr(LateBinding, "turn", stopped)
    stuck = await run(server, requests_of(flood(), calm()))
    in_time = [
        sum(each.request.tenant.name == "flood" and each.last <= SECONDS for each in outcome.served)
        for outcome in (free, stuck)
    ]
    # A place is empty for `YIELD_S` at most, until a turn, and then taken for `SERVICE_S` or so.
    assert in_time[1] >= in_time[0] * SERVICE_S / (SERVICE_S + fair_queue.YIELD_S + 0.3)
