"""Slots that a gateway yields to another one with a tenant of a lower counter: when, for how long, never all."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.base.clock import Clock
from tandem_services.gateway.queueing.fair_queue import (
    FRESH_S,
    HEAD_AFTER_S,
    TAKE_S,
    YIELD_S,
    HeadYield,
    Waiting,
    queue_head,
)
from tandem_services.router.shared_state import QueueHead, RemoteHead, Standing


@dataclass
class Time(Clock):
    seconds: float = 100.0

    def now(self) -> float:
        return self.seconds


@dataclass
class Here:
    """A gateway where "busy" is next, whose prompt costs 50."""

    clock: Time = field(default_factory=Time)
    way: HeadYield = field(init=False)

    def __post_init__(self) -> None:
        self.way = HeadYield(clock=self.clock)

    def queue_heads(self, *others: tuple[int, float], value: float = 1000.0) -> None:
        elsewhere = tuple(RemoteHead(priority=priority, value=value) for priority, value in others)
        self.way.update(Standing(values={"busy": value}, floor=0.0, heads=elsewhere))

    def yields(self, priority: int = 0, tenant: str = "busy") -> bool:
        return self.way.yields(head(tenant, priority), 50.0)


def head(tenant: str, priority: int = 0, arrived: float = 0.0) -> Waiting:
    return Waiting(tenant=tenant, weight=1.0, priority=priority, arrived=arrived)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], False),
        ([(0, 1000.0)], False),
        # Behind by no more than the prompt costs.
        ([(0, 950.0)], False),
        ([(0, 949.0)], True),
        ([(0, 2000.0), (0, 10.0)], True),
        # A lesser priority has to wait, a greater one goes first whatever it has had.
        ([(-1, 10.0)], False),
        ([(1, 2000.0)], True),
    ],
)
def test_gateway_yields_to_lower_counter_or_higher_priority(others, expected):
    here = Here()
    here.queue_heads(*others)
    assert here.yields() is expected


def test_stale_or_absent_offers_are_ignored():  # Redis is away
    here = Here()
    assert not here.yields()
    here.queue_heads((0, 10.0))
    assert here.yields()
    assert not here.yields(tenant="who has come since")
    here.clock.seconds += FRESH_S + 0.01
    assert not here.yields()


def test_gateway_alternates_between_yielding_and_taking_slots():
    here = Here()
    given = []
    for _ in range(400):
        here.queue_heads((0, 10.0))
        given.append(here.yields())
        here.clock.seconds += 0.01
    period = round((YIELD_S + TAKE_S) * 100)
    assert sum(given[:period]) == pytest.approx(YIELD_S * 100, abs=1)
    assert sum(given) == pytest.approx(len(given) * YIELD_S / (YIELD_S + TAKE_S), rel=0.02)


@pytest.mark.parametrize("quiet_s", [0.1, 0.3, 0.9])
@pytest.mark.parametrize("shift_s", [0.0, 0.1, 0.5])
def test_gateway_ahead_takes_slots_between_yields(quiet_s, shift_s):
    """A tenant of little use that asked every half a second kept a flood beside it from ever taking."""
    here, tried, asked = Here(), 0, 0
    start = here.clock.seconds
    for _ in range(3000):
        here.queue_heads((0, 10.0))
        if (here.clock.seconds - start + shift_s) % (quiet_s + 0.1) < 0.1:
            asked += 1
            tried += not here.yields()
        else:
            # It has had nothing yet, so that each tenant that waits elsewhere is ahead of it.
            here.way.update(Standing(values={"calm": 0.0}, floor=0.0, heads=(RemoteHead(priority=0, value=10.0),)))
            assert not here.way.yields(head("calm"), 50.0)
        here.clock.seconds += 0.01
    assert 0 < asked < 3000
    # A fifth of the time where it is next often enough, and never all of it.
    assert 0.1 * asked < tried < 0.6 * asked


def test_gateway_ahead_after_a_pause_yields_first():
    here = Here()
    here.queue_heads((0, 10.0))
    assert here.yields()
    here.clock.seconds += YIELD_S + TAKE_S + 0.1
    here.queue_heads((0, 10.0))
    assert here.yields()


@pytest.mark.parametrize(("waited", "expected"), [(0.0, None), (0.29, None), (0.31, QueueHead(priority=2, tenant="a"))])
def test_queue_head_is_reported_after_a_minimum_wait(waited, expected):
    assert queue_head(head("a", 2, arrived=10.0), 10.0 + waited) == expected
    assert queue_head(None, 10.0) is None
    assert HEAD_AFTER_S == 0.3


@given(
    heads=st.lists(st.tuples(st.integers(-2, 2), st.sampled_from("abc"), st.floats(0, 1e6)), min_size=1, max_size=6),
    counters=st.fixed_dictionaries({name: st.floats(0, 1e9) for name in "abc"}),
)
def test_one_of_equally_informed_gateways_continues(heads, counters):
    """No deadlock: the first head of all of them, by priority and then by counter, does not yield."""
    others = [RemoteHead(priority=priority, value=counters[tenant]) for priority, tenant, _ in heads]
    gives = []
    for number, (priority, tenant, cost) in enumerate(heads):
        way = HeadYield(clock=Time())
        elsewhere = tuple(head for other, head in enumerate(others) if other != number)
        way.update(Standing(values=counters, floor=0.0, heads=elsewhere))
        gives.append(way.yields(head(tenant, priority), cost))
    first = min(range(len(heads)), key=lambda number: (-heads[number][0], counters[heads[number][1]]))
    assert not gives[first]
