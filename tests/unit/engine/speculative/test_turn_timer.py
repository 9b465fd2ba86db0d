"""A step's time is that of the turn which settled it, where the turn shows what such a step costs."""

import pytest

from tandem_engine.speculative.adaptive_length import Settled, TurnTimer
from tandem_testing.scheduler_builders import ManualClock

PLAIN = Settled(batch=2, drafts=0, propose_s=0.0)
DRAFTED = Settled(batch=2, drafts=8, propose_s=1.0)


class Turns:
    """A loop whose turns have set durations."""

    def __init__(self, *, catches_up: bool = False) -> None:
        self.clock = ManualClock()
        self.timer = TurnTimer(clock=self.clock, catches_up=catches_up)
        self.timer.begin_turn()

    def turn(self, settled: Settled | None, seconds: float, *, propose_s: float | None = None) -> float | None:
        """Seconds that the step is reported to have taken."""
        if settled is not None:
            self.timer.settled(settled)
        if propose_s is not None:
            self.timer.count_proposal(propose_s)
        self.clock.time += seconds
        timed = self.timer.begin_turn()
        assert timed is None or timed.step == settled
        return timed and timed.seconds


def test_plain_step_time_is_iteration_that_completed_it():
    assert Turns().turn(PLAIN, 3.0) == 3.0


def test_iteration_without_decode_completion_is_not_measured():
    assert Turns().turn(None, 3.0) is None


def test_proposing_counts_for_the_step_that_has_the_drafts():
    # The turn took 1 s to propose the drafts it settled, before it began, and 2 s for those of the step it launched.
    turns = Turns()
    assert turns.turn(DRAFTED, 6.0, propose_s=2.0) == pytest.approx(6.0 - 2.0 + 1.0)
    assert turns.turn(DRAFTED, 6.0) == pytest.approx(6.0 + 1.0)


def test_plain_step_completed_early_for_drafts_is_not_measured():
    turns = Turns()
    assert turns.turn(PLAIN, 5.0, propose_s=1.0) is None
    assert turns.turn(PLAIN, 3.0) == 3.0


def test_first_step_of_draft_model_is_not_measured():
    turns = Turns(catches_up=True)
    assert turns.turn(PLAIN, 3.0) == 3.0
    assert turns.turn(DRAFTED, 9.0) is None
    assert turns.turn(DRAFTED, 4.0) == 5.0
    assert Turns(catches_up=False).turn(DRAFTED, 4.0) == 5.0


def test_first_plain_step_after_drafts_is_not_measured():
    turns = Turns()
    turns.turn(DRAFTED, 4.0)
    assert turns.turn(PLAIN, 3.5) is None
    assert turns.turn(PLAIN, 3.0) == 3.0


def test_idle_time_is_not_measured():
    turns = Turns()
    turns.timer.settled(PLAIN)
    turns.timer.interrupt()
    turns.clock.time += 1000.0
    assert turns.timer.begin_turn() is None


def test_stopped_clock_measures_nothing():
    assert Turns().turn(PLAIN, 0.0) is None
