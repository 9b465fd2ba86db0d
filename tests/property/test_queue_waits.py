"""Waits of the queueing model against a discrete simulation of the same queue."""

from heapq import heappop, heappush
from random import Random

import pytest

from tandem_operator.scaling.queueing import Queue

ARRIVALS = 100_000


def service_time(random: Random, variation: float) -> float:
    """Of mean 1: exponential, or of two exponentials with balanced means."""
    if variation == 1.0:
        return random.expovariate(1.0)
    short = 0.5 * (1 + ((variation - 1) / (variation + 1)) ** 0.5)
    rate = 2 * short if random.random() < short else 2 * (1 - short)
    return random.expovariate(rate)


def waits(workers: int, usage: float, variation: float) -> list[float]:
    """Of a Poisson process, first come first served; sorted."""
    random, free, at, found = Random(7), [0.0] * workers, 0.0, []
    for _ in range(ARRIVALS):
        at += random.expovariate(usage * workers)
        begins = max(at, heappop(free))
        heappush(free, begins + service_time(random, variation))
        found.append(begins - at)
    return sorted(found[ARRIVALS // 10 :])


@pytest.mark.parametrize("variation", [1.0, 3.0])
@pytest.mark.parametrize("usage", [0.5, 0.8, 0.9])
@pytest.mark.parametrize("workers", [1, 2, 4, 16])
def test_quantiles_are_near_a_discrete_simulation(workers, usage, variation):
    """At most twice as long, and 1.3 times too short, where waits matter at all."""
    queue = Queue(workers=workers, load=usage * workers, service_s=1.0, service_variation=variation)
    found = waits(workers, usage, variation)
    for share in (0.8, 0.9, 0.95):
        measured = found[int(share * len(found))]
        if measured > 0.1:
            assert measured / 1.3 <= queue.waits().quantile(share) <= 2 * measured


def test_erlang_c_of_known_systems():
    """M/M/1 waits with probability rho; M/M/2 with 2 rho^2 / (1 + rho)."""
    assert Queue(workers=1, load=0.7, service_s=1.0).wait_probability() == pytest.approx(0.7)
    assert Queue(workers=2, load=1.2, service_s=1.0).wait_probability() == pytest.approx(2 * 0.36 / 1.6)
    assert Queue(workers=1, load=0.7, service_s=1.0).mean_wait_s() == pytest.approx(0.7 / 0.3)


def test_share_within_is_the_inverse_of_the_quantile():
    found = Queue(workers=3, load=2.5, service_s=0.4, service_variation=2.0).waits()
    for share in (0.5, 0.9, 0.99):
        assert found.share_within(found.quantile(share)) == pytest.approx(max(share, 1 - found.probability))
    assert found.share_within(-0.1) == 0.0


def test_overloaded_queue_never_ends():
    found = Queue(workers=2, load=2.0, service_s=1.0).waits()
    assert (found.probability, found.mean_s, found.share_within(1e9)) == (1.0, float("inf"), 0.0)
