"""What is known of another process's clock."""

import math

import pytest

from tandem_engine.disaggregation.grants import DRIFT, PeerClocks


def test_clock_bound_of_unknown_peer_is_minus_infinity():
    assert PeerClocks().earliest("d@1", 5.0) == -math.inf


def test_peer_clock_sample_bounds_earlier_and_later_times():
    clocks = PeerClocks()
    clocks.learn("d@1", requested_at=100.0, answered_at=7.0, now=100.5)
    assert clocks.earliest("d@1", 7.0) == 100.0
    assert clocks.earliest("d@1", 1007.0) == pytest.approx(1100.0 - 1000 * DRIFT)
    assert clocks.earliest("d@1", 6.0) == pytest.approx(99.0 - DRIFT)


@pytest.mark.parametrize("delay", [0.0, 0.2, 30.0])
@pytest.mark.parametrize("offset", [-1e6, 0.0, 3e5])
def test_converted_peer_time_is_never_later_than_the_event(delay, offset):
    """However long question and answer were on their way."""
    clocks = PeerClocks()
    clocks.learn("d@1", requested_at=100.0, answered_at=100.0 + delay + offset, now=100.0 + 2 * delay)
    for sent_at in (50.0, 100.0, 5000.0):
        assert clocks.earliest("d@1", sent_at + offset) <= sent_at + 1e-9


def test_quickest_answer_counts_whenever_it_came():
    clocks = PeerClocks()
    clocks.learn("d@1", requested_at=100.0, answered_at=37.0, now=140.0)
    clocks.learn("d@1", requested_at=150.0, answered_at=57.0, now=150.1)
    assert clocks.earliest("d@1", 57.0) == 150.0
    clocks.learn("d@1", requested_at=160.0, answered_at=97.0, now=200.0)
    assert clocks.earliest("d@1", 57.0) == 150.0


def test_newer_peer_clock_sample_replaces_drifted_one():
    clocks = PeerClocks()
    clocks.learn("d@1", requested_at=100.0, answered_at=7.0, now=100.0)
    clocks.learn("d@1", requested_at=10_099.0, answered_at=10_007.0, now=10_100.0)
    assert clocks.earliest("d@1", 10_007.0) == 10_099.0


@pytest.mark.parametrize(
    ("requested_at", "answered_at"),
    [(200.0, 7.0), (math.nan, 7.0), (-math.inf, 7.0), (100.0, math.nan), (100.0, math.inf)],
)
def test_invalid_clock_readings_are_ignored(requested_at, answered_at):
    clocks = PeerClocks()
    clocks.learn("d@1", requested_at=requested_at, answered_at=answered_at, now=150.0)
    assert clocks.earliest("d@1", 7.0) == -math.inf


def test_dead_are_forgotten():
    clocks = PeerClocks()
    clocks.learn("d@1", requested_at=100.0, answered_at=7.0, now=100.0)
    clocks.forget("d@1")
    clocks.forget("d@1")
    assert clocks.earliest("d@1", 7.0) == -math.inf
