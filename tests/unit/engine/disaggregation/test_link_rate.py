"""The moving average of a link."""

import pytest

from tandem_engine.disaggregation.links import FADE_BYTES, FADE_S, LinkRate

MIB = 1 << 20


def test_nothing_is_known_before_anything_was_written():
    rate = LinkRate()
    rate.pushed(size=MIB, seconds=0.0, now=1.0)
    assert (rate.bytes_per_s, rate.changed_at) == (0.0, None)


def test_link_test_replaces_the_link_rate():
    rate = LinkRate()
    rate.pushed(size=MIB, seconds=1.0, now=1.0)
    rate.measured(size=10 * MIB, seconds=0.02, latency_s=0.01, now=2.0)
    assert rate.bytes_per_s == pytest.approx(1000 * MIB)
    assert rate.changed_at == 2.0


def test_small_pushes_change_link_rate_little():
    rate = LinkRate()
    rate.measured(size=16 * MIB, seconds=0.016, latency_s=0.0005, now=0.0)
    before = rate.bytes_per_s
    for _ in range(20):
        rate.pushed(size=100_000, seconds=0.0006, now=1.0)
    assert rate.bytes_per_s == pytest.approx(before, rel=0.25)


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_link_rate_follows_a_change_within_fade_bytes_or_time(factor):
    rate = LinkRate()
    rate.measured(size=16 * MIB, seconds=0.016, latency_s=0.0, now=0.0)
    speed = rate.bytes_per_s * factor
    written = 0
    while written < 5 * FADE_BYTES and written / speed < 5 * FADE_S:
        rate.pushed(size=4 * MIB, seconds=4 * MIB / speed, now=1.0)
        written += 4 * MIB
    assert rate.bytes_per_s == pytest.approx(speed, rel=0.1)
