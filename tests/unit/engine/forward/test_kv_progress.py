"""How far a step has written KV, on the host and on a stream."""

from concurrent.futures import Future

import pytest

from tandem_engine.forward.kv_progress import ALL_LAYERS, VOID, KvProgress
from tandem_testing.ended_step import over
from tandem_testing.scheduler_builders import ManualClock


class Mark:
    """An event of a stream that gets there when the test says so."""

    def __init__(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached


def test_on_the_host_a_layer_counts_at_once():
    progress = KvProgress(ManualClock())
    seen = [progress.layers]
    for layer in range(3):
        progress.wrote(layer)
        seen.append(progress.layers)
    assert seen == [0, 1, 2, 3]


def test_on_a_stream_a_layer_counts_when_the_stream_got_there():  # [settled-only-sent]
    marks = [Mark() for _ in range(3)]
    progress = KvProgress(ManualClock())
    for layer, mark in enumerate(marks):
        progress.wrote(layer, mark)
    assert progress.layers == 0
    marks[0].reached = True
    assert progress.layers == 1
    marks[1].reached = marks[2].reached = True
    assert progress.layers == 3


def test_ended_step_has_all_layers_and_end_time():
    clock = ManualClock()
    progress = KvProgress(clock)
    progress.wrote(0)
    assert progress.ended_at is None
    clock.time = 7.0
    progress.ended(over())
    assert (progress.layers, progress.ended_at) == (ALL_LAYERS, 7.0)


@pytest.mark.parametrize("written", [0, 2])
def test_failed_step_voids_kv_progress(written):
    progress = KvProgress(ManualClock())
    for layer in range(written):
        progress.wrote(layer)
    progress.ended(over(ValueError("no")))
    assert progress.layers == VOID


def test_step_that_never_runs_is_void():
    progress = KvProgress(ManualClock())
    step: Future[None] = Future()
    step.add_done_callback(progress.ended)
    step.cancel()
    assert progress.layers == VOID


@pytest.mark.parametrize("asked_first", [True, False])
def test_kv_progress_callback_runs_if_set_before_or_after_end(asked_first):
    progress, woken = KvProgress(ManualClock()), []
    steps = [lambda: progress.on_end(lambda: woken.append(progress.layers)), lambda: progress.ended(over())]
    for step in steps if asked_first else reversed(steps):
        step()
    assert woken == [ALL_LAYERS]
