"""Inputs of the autoscaler of a simulation: load of workers, and requests that gateways hold back."""

from dataclasses import replace

import pytest

from tandem_lab.simulate.autoscaling import SeenLoad
from tandem_lab.simulate.clock import EventQueue, SimulatedRedis
from tandem_lab.simulate.fleet import Fleet, FleetShape
from tandem_lab.simulate.gateway import Held
from tandem_services.common.redis_client import RedisAddress

SHAPE = FleetShape(prefill=1, decode=1, cache_blocks=10, block_tokens=512)
NONE_HELD = Held(requests=0, prompt_tokens=0, oldest_wait_s=0.0, without_worker=0)


def seen_load(held: Held) -> SeenLoad:
    simulated = SimulatedRedis(address=RedisAddress(url="redis://127.0.0.1:1"), cluster="load", events=EventQueue())
    shape = replace(SHAPE, max_sequences=4)
    return SeenLoad.of(Fleet(shape, simulated), shape, held=lambda: held)


def test_requests_queued_in_gateways_count_for_both_roles():
    seen = seen_load(Held(requests=7, prompt_tokens=9000, oldest_wait_s=2.5, without_worker=3))
    seen.counters.asked(10_000)
    seen.counters.admitted(1000)
    load = seen.load(5.0)
    # All of what does not wait was cached; one look counts for three tenths.
    assert load.prefill.queued_tokens == pytest.approx(9000 * 0.7)
    assert (load.decode.waiting, load.decode.running) == (7, 0)
    assert (load.prefill.oldest_wait_s, load.decode.oldest_wait_s) == (2.5, 2.5)
    assert load.held == 3
    assert not load.idle
    assert load.error() == ""


def test_arrivals_count_at_arrival_not_admission():
    seen = seen_load(Held(requests=9, prompt_tokens=5400, oldest_wait_s=1.0, without_worker=0))
    for _ in range(10):
        seen.counters.asked(600)
    seen.counters.admitted(300)
    seen.counters.began(1.0)
    seen.counters.ended(5.0)
    load = seen.load(5.0)
    assert load.prefill.arrived_tokens_per_s == pytest.approx(10 * 600 / 5.0 * (1 - 0.15))
    assert load.decode.arrived_per_s == 2.0
    assert load.decode.seconds_each == pytest.approx(10.0 - 0.3 * 6.0)
    # From look to look.
    later = seen.load(5.0)
    assert (later.prefill.arrived_tokens_per_s, later.decode.arrived_per_s) == (0.0, 0.0)


def test_idle_fleet_load_has_worker_sizes():
    load = seen_load(NONE_HELD).load(5.0)
    assert load.idle
    assert (load.prefill.worker_tokens_per_s, load.decode.worker_places, load.decode.worker_pages) == (10_000.0, 4, 10)


def test_no_sequence_is_longer_than_a_pool():
    assert SHAPE.longest == 10 * 512
    assert FleetShape(both=1, cache_blocks=10, block_tokens=512, context_length=4000).longest == 4000
