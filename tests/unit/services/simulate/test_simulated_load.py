"""What the autoscaler of a simulation is told: of workers, and of what gateways hold back."""

import pytest

from tandem_services.common.redis_client import RedisAddress
from tandem_services.simulate.autoscaling import Autoscaling, Demand, ScalingCosts
from tandem_services.simulate.events import EventQueue
from tandem_services.simulate.fleet import Fleet, FleetShape
from tandem_services.simulate.gateway import Held
from tandem_services.simulate.redis_time import SimulatedRedis
from tandem_services.simulate.scalers import Static
from tandem_services.simulate.service_times import ServiceTimes

SHAPE = FleetShape(prefill=1, decode=1, cache_blocks=10, block_tokens=512)


def autoscaling(held: Held) -> Autoscaling:
    simulated = SimulatedRedis(address=RedisAddress(url="redis://127.0.0.1:1"), cluster="load", events=EventQueue())
    return Autoscaling(
        fleet=Fleet(SHAPE, simulated),
        scaler=Static(),
        costs=ScalingCosts(period_s=5.0),
        times=ServiceTimes(),
        max_sequences=4,
        held=lambda: held,
    )


def test_what_gateways_hold_back_waits_for_both_roles():
    scaling = autoscaling(Held(requests=7, prompt_tokens=9000, oldest_wait_s=2.5, without_worker=3))
    scaling.demand.admitted(1000, 1000)
    load = scaling.load()
    # All of what was admitted was cached; one look counts for three tenths.
    assert load.prefill.queued_tokens == pytest.approx(9000 * 0.7)
    assert (load.decode.waiting, load.decode.running) == (7, 0)
    assert (load.prefill.oldest_wait_s, load.decode.oldest_wait_s) == (2.5, 2.5)
    assert load.held == 3
    assert not load.idle
    assert load.trouble() == ""


def test_what_came_counts_when_it_came_and_not_when_it_was_admitted():
    demand = Demand()
    for _ in range(10):
        demand.asked(600)
    demand.admitted(600, 300)
    demand.finished(4.0)
    tokens, requests = demand.take(5.0)
    assert tokens == pytest.approx(10 * 600 / 5.0 * (1 - 0.15))
    assert requests == 2.0
    assert demand.seconds_each == pytest.approx(10.0 - 0.3 * 6.0)
    assert demand.take(5.0) == (0.0, 0.0)


def test_no_sequence_is_longer_than_a_pool():
    assert SHAPE.longest == 10 * 512
    assert FleetShape(both=1, cache_blocks=10, block_tokens=512, context_length=4000).longest == 4000
