"""A long load tells how far it is."""

import logging

import pytest

from tandem_engine.model.loader import GIB, PERIOD_S, load_progress


class SetClock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def now(self) -> float:
        return self.seconds


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "tandem_engine.model.loader")
    return lambda: [record.getMessage() for record in caplog.records]


def test_load_progress_without_terminal_is_logged_periodically(lines) -> None:
    clock = SetClock()
    with load_progress(8 * GIB, shown=True, clock=clock) as advance:
        assert lines() == ["loading weights: 8.00 GiB"]
        advance(GIB)
        clock.seconds += PERIOD_S
        advance(GIB)
        advance(GIB)
        clock.seconds += PERIOD_S
        advance(GIB)
    assert lines()[1:] == ["loading weights: 2.00 of 8.00 GiB, 25 %", "loading weights: 4.00 of 8.00 GiB, 50 %"]


def test_hidden_load_progress_writes_nothing(lines, capfd) -> None:
    clock = SetClock()
    with load_progress(GIB, shown=False, clock=clock) as advance:
        clock.seconds += PERIOD_S
        advance(GIB)
    assert lines() == []
    assert capfd.readouterr() == ("", "")


def test_progress_lines_name_the_given_action(lines) -> None:
    clock = SetClock()
    with load_progress(4 * GIB, shown=True, doing="moving", clock=clock) as advance:
        clock.seconds += PERIOD_S
        advance(GIB)
    assert lines() == ["moving: 4.00 GiB", "moving: 1.00 of 4.00 GiB, 25 %"]
