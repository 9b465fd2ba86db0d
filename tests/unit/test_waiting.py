"""Waits of tests: how long they rest between two looks."""

import pytest

from tandem_testing import waiting


class Clock:
    """Stands still but for sleeps and for what a look takes."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(waiting, "time", clock)
    return clock


@pytest.mark.parametrize(("took", "rest"), [(0.0, 0.02), (0.002, 0.02), (0.05, 0.2), (10.0, 0.5)])
def test_wait_rests_longer_after_a_long_look(clock, took, rest):
    looks = 0

    def third_look() -> bool:
        nonlocal looks
        looks += 1
        clock.now += took
        return looks == 3

    waiting.wait_for(third_look, timeout_s=60)
    assert clock.slept == pytest.approx([rest, rest])


def test_wait_past_its_deadline_explains_itself(clock):
    with pytest.raises(AssertionError, match="not within 1 s: two of three"):
        waiting.wait_for(lambda: False, 1, lambda: "two of three")
    assert clock.now == pytest.approx(101, abs=0.03)


def test_wait_that_times_out_names_the_last_and_the_expected_value(clock):
    with pytest.raises(AssertionError, match="3, not 4 within 1 s"):
        waiting.wait_equal(lambda: 3, 4, 1)
