"""Histograms of metrics as distributions."""

from math import inf, nan

import pytest

from tandem_operator.scaling.distribution import MAX_RANGES, Distribution
from tandem_testing.latency_figures import distribution_of

EVEN = Distribution.of((1.0, 2.0, 4.0, inf), (0.0, 10.0, 10.0, 0.0), 45.0)


def test_quantiles_and_shares_are_interpolated():
    assert (EVEN.quantile(0.25), EVEN.quantile(0.75), EVEN.quantile(1.0)) == (1.5, 3.0, 4.0)
    assert [EVEN.share_up_to(value) for value in (0.5, 1.5, 3.0, 4.0, 99.0)] == [0.0, 0.25, 0.75, 1.0, 1.0]
    assert EVEN.mean == 45.0 / 20
    assert sum(share for _, share in EVEN.points()) == pytest.approx(1.0)


def test_variation_is_near_that_of_the_values():
    values = [float(100 + 37 * number % 9000) for number in range(4000)]
    mean = sum(values) / len(values)
    exact = sum((value - mean) ** 2 for value in values) / len(values) / mean**2
    assert distribution_of(values).squared_variation == pytest.approx(exact, rel=0.15)


def test_empty_distribution_has_zeros():
    empty = Distribution.of((1.0, inf), (0.0, 0.0), 0.0)
    assert (empty.mean, empty.squared_variation, empty.quantile(0.9), empty.share_up_to(5.0)) == (0, 0, 0, 0)
    assert [*empty.points()] == []


def test_restarted_counter_counts_from_zero():
    less = Distribution.of((1.0, 2.0, 4.0, inf), (1.0, 2.0, 3.0, 0.0), 9.0)
    assert EVEN.since(None) == EVEN
    assert less.since(EVEN) == less
    more = EVEN.plus(less)
    assert more.since(EVEN) == less
    assert more.times(0.5).count == 13.0


def test_other_buckets_are_not_mixed():
    other = Distribution.of((1.0, 3.0, inf), (1.0, 2.0, 0.0), 5.0)
    assert other.since(EVEN) == other
    assert EVEN.plus(other) == other


@pytest.mark.parametrize(
    ("bounds", "counts", "total"),
    [
        ((1.0, 1.0, inf), (0.0, 0.0, 0.0), 0.0),
        ((2.0, 1.0), (0.0, 0.0), 0.0),
        ((1.0, nan), (0.0, 0.0), 0.0),
        ((-1.0, 1.0), (0.0, 0.0), 0.0),
        ((1.0, inf), (nan, 0.0), 0.0),
        ((1.0, inf), (-1.0, 0.0), 0.0),
        ((1.0, inf), (1.0, 0.0), inf),
        ((1.0, inf), (1.0,), 1.0),
        ((1.0,), (1.0,), 1.0),
        (tuple(map(float, range(MAX_RANGES + 1))), (0.0,) * (MAX_RANGES + 1), 0.0),
    ],
)
def test_impossible_histogram_is_an_error(bounds, counts, total):
    with pytest.raises(ValueError, match="histogram"):
        Distribution.of(bounds, counts, total)
