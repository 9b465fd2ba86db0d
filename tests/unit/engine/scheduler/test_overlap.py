"""Step N+1 is launched before step N is settled [overlap-launch]."""

from collections.abc import Callable
from concurrent.futures import Future

import pytest

from tandem_engine.forward.batch import RESOLVE, ForwardBatch, ForwardResult
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.scheduler import loop
from tandem_testing.fake_executors import EagerExecutor, resolve
from tandem_testing.quiet_stage import QuietStage
from tandem_testing.scheduler_builders import Engine, ManualClock, expected_output, make_engine, make_message


def overlapped(**settings: object) -> Engine:
    return make_engine(enable_overlap=True, **settings)


def test_step_is_launched_before_previous_step_completes():
    engine = overlapped()
    engine.add(make_message(max_tokens=4))
    engine.step()
    assert (engine.scheduler.tally.launched, engine.scheduler.tally.settled) == (1, 0)
    engine.step()
    assert (engine.scheduler.tally.launched, engine.scheduler.tally.settled) == (2, 1)


def test_no_more_than_one_step_is_ahead():
    engine = overlapped()
    engine.add(make_message(max_tokens=9))
    while not engine.scheduler.idle:
        engine.step()
        assert engine.scheduler.tally.launched - engine.scheduler.tally.settled <= 1


def test_token_known_only_to_the_device_is_resolved_there():  # [device-history]
    engine = overlapped()
    engine.add(make_message(prompt=[1, 2, 3], max_tokens=3))
    engine.run()
    prefill, *decodes = engine.executor.batches
    assert prefill.input_ids.tolist() == [1, 2, 3]
    assert [batch.input_ids.tolist() for batch in decodes] == [[RESOLVE], [RESOLVE]]


def test_scheduler_keeps_batch_tensors_of_step_in_flight():
    """To free them it would release the interpreter lock, and begin the next step after the scheduler's turn."""
    engine = overlapped()
    engine.add(make_message(max_tokens=4))
    engine.step()
    assert engine.scheduler._loop.in_flight.view is engine.executor.batches[-1]


def test_host_has_every_token_without_overlap():
    engine = make_engine()
    engine.add(make_message(prompt=[1, 2, 3], max_tokens=3))
    engine.run()
    assert all(RESOLVE not in batch.input_ids.tolist() for batch in engine.executor.batches)


def test_no_step_is_launched_past_max_tokens():
    engine = overlapped()
    engine.add(make_message(max_tokens=5))
    engine.run()
    assert len(engine.executor.batches) == 5


def test_surplus_token_of_a_request_that_stopped_is_dropped():  # [ended-is-skipped]
    engine = overlapped()
    message = make_message(max_tokens=30)
    stop = expected_output(message)[3]
    engine.add(make_message(max_tokens=30, stop_token_ids=(stop,)))
    engine.run()
    assert engine.output() == expected_output(engine.messages["r"])
    assert len(engine.executor.batches) == len(engine.output()) + 1
    assert engine.finish().matched_stop == stop
    assert engine.received["r"].outputs[-1].finish is not None


def test_memory_that_a_step_in_flight_may_write_waits_for_it():  # [page-fence]
    engine = overlapped(page_size=1, radix=False)
    stop = expected_output(make_message(max_tokens=30))[3]
    engine.add(make_message(max_tokens=30, stop_token_ids=(stop,)))
    while engine.finish() is None:
        engine.step()
    assert engine.scheduler.for_stages.step_in_flight is not None
    fenced = engine.scheduler.audit().fenced
    assert fenced > 0
    assert engine.memory.available_pages() == 64 - fenced
    engine.step()
    assert engine.memory.available_pages() == 64


def test_deduplicated_pages_are_fenced_until_step_completes():  # [page-fence]
    engine = overlapped(page_size=4)
    for rid in ("one", "two"):
        engine.add(make_message(rid, range(1, 9), max_tokens=4))
    engine.step(2)
    assert engine.scheduler.audit().fenced == 2
    engine.step()
    assert engine.scheduler.audit().fenced == 0


def test_row_is_not_given_out_while_a_step_in_flight_uses_it():  # [row-snapshot]
    engine = overlapped(max_rows=1)
    stop = expected_output(make_message(max_tokens=30))[3]
    engine.add(make_message("one", max_tokens=30, stop_token_ids=(stop,)))
    engine.add(make_message("two", [7, 8], max_tokens=3))
    while engine.finish("one") is None:
        engine.step()
    assert engine.memory.rows.available == 0
    engine.run()
    engine.assert_expected()


def test_forward_reads_a_snapshot_of_the_rows():  # [row-snapshot]
    engine = overlapped(executor=EagerExecutor, page_size=1)
    engine.add(make_message(prompt=[1, 2, 3], max_tokens=4))
    engine.step()
    seen = engine.executor.batches[0].page_table.clone()
    engine.run()
    assert engine.executor.batches[0].page_table.equal(seen)


def test_abort_between_launch_and_completion_drops_the_token():  # [abort-is-deferred]
    engine = overlapped()
    engine.add(make_message(max_tokens=9))
    engine.step()
    engine.scheduler.abort("r")
    assert engine.scheduler.audit().requests == 1
    engine.run()
    assert engine.output() == []
    assert engine.finish().reason is FinishReason.ABORT
    engine.assert_nothing_held()


def test_aborted_request_is_not_launched_again():
    engine = overlapped()
    engine.add(make_message(max_tokens=9))
    engine.step(3)
    engine.scheduler.abort("r")
    engine.run()
    assert engine.scheduler.tally.launched == 3


def test_abort_after_the_last_chunk_was_launched_leaks_nothing():  # [abort-before-token] [owned-by-cursor]
    engine = overlapped(chunked_prefill_size=4, page_size=1)
    engine.add(make_message(prompt=range(1, 9), max_tokens=9))
    engine.step(2)
    engine.scheduler.abort("r")
    engine.run()
    assert engine.output() == []
    engine.assert_nothing_held()


@pytest.mark.parametrize("after", range(1, 8))
def test_abort_at_any_moment_ends_the_output_once(after):
    engine = overlapped(chunked_prefill_size=3, enable_mixed_chunk=True)
    engine.add(make_message("other", [9, 8, 7], max_tokens=12))
    engine.add(make_message(prompt=range(1, 9), max_tokens=9))
    engine.step(after)
    engine.scheduler.abort("r")
    engine.scheduler.abort("r")
    engine.run()
    assert engine.finish().reason is FinishReason.ABORT
    assert engine.output() == expected_output(engine.messages["r"])[: len(engine.output())]
    engine.assert_expected("other")
    engine.assert_nothing_held()


def test_time_spent_while_the_device_computes_counts_as_hidden():
    clock = TickingClock()
    hidden = {}
    for overlap in (False, True):
        engine = make_engine(enable_overlap=overlap)
        engine.scheduler._loop.clock = clock
        engine.add(make_message(max_tokens=10))
        engine.run()
        hidden[overlap] = engine.scheduler.stats().overlap_hidden_s
        assert engine.scheduler.stats().schedule_s > hidden[overlap]
    assert hidden[False] == 0.0
    assert hidden[True] > 0.0


def test_forward_that_runs_inside_launch_is_no_scheduling():
    engine = make_engine()
    clock = engine.clock
    engine.executor.faults = lambda _batch: setattr(clock, "time", clock.time + 1.0)
    engine.add(make_message(max_tokens=5))
    engine.run()
    assert clock.time == 5.0
    assert engine.scheduler.stats().schedule_s == 0.0


class TickingClock(ManualClock):
    """A millisecond passes at each reading."""

    def now(self) -> float:
        self.time += 0.001
        return self.time


class StuckExecutor(EagerExecutor):
    """Leaves every forward undone until `finish` is called."""

    def launch(self, batch: ForwardBatch) -> Future[ForwardResult]:
        self.batches.append(batch)
        self.future: Future[ForwardResult] = Future()
        return self.future

    def finish(self) -> None:
        resolve(self.future, self.model, self.batches[-1], self.faults)


def test_during_a_long_step_the_owner_of_the_loop_answers_others(monkeypatch):
    monkeypatch.setattr(loop, "WAIT_SLICE", 0.001)
    engine = make_engine(executor=StuckExecutor)
    answers = []

    def answer_others() -> None:
        answers.append(engine.scheduler.tally.loops)
        if len(answers) == 3:
            engine.executor.finish()

    engine.scheduler.on_wait(answer_others)
    engine.add(make_message(max_tokens=1))
    engine.step()
    assert answers == [2, 3, 4], "each slice of the wait counts as a turn"
    engine.assert_expected()


def test_step_that_never_comes_back_is_not_covered_up(monkeypatch):
    monkeypatch.setattr(loop, "WAIT_SLICE", 0.001)
    engine = make_engine(executor=StuckExecutor)
    answers = []
    hangs: list[float] = []
    slices_after = iter(range(5))

    class Rescue(ManualClock):
        """Ends the step some slices of the wait after it was reported."""

        def now(self) -> float:
            if hangs and next(slices_after, None) is None and not engine.executor.future.done():
                engine.executor.finish()
            return self.time

    def answer_others() -> None:
        answers.append(clock.time)
        clock.time += engine.scheduler.config.watchdog_timeout / 2

    clock = engine.scheduler._loop.clock = Rescue()
    engine.scheduler.on_wait(answer_others)
    engine.scheduler.on_hang(hangs.append)
    engine.add(make_message(max_tokens=1))
    engine.step()
    assert len(answers) == 2, "after the longest step nobody is told any more that this engine lives"
    assert hangs == [engine.scheduler.config.watchdog_timeout], "and it is reported once"


class ImpatientStage(QuietStage):
    """Has handoffs under way for so many looks; then the step ends."""

    def __init__(self, looks: int, end: Callable[[], None]) -> None:
        super().__init__()
        self.looks = [True] * looks
        self.end = end

    def run_during_forward(self) -> bool:
        if self.looks:
            return self.looks.pop()
        self.end()
        return False


def test_handoffs_under_way_are_looked_at_during_a_step(monkeypatch):
    monkeypatch.setattr(loop, "WAIT_SLICE", 3600.0)
    engine = make_engine(executor=StuckExecutor)
    stage = ImpatientStage(looks=3, end=engine.executor.finish)
    engine.scheduler.attach(stage)
    engine.add(make_message(max_tokens=1))
    engine.step()
    assert stage.looks == []
    engine.assert_expected()


def test_handoff_poll_interval_doubles_within_a_wait_slice(monkeypatch):
    monkeypatch.setattr(loop, "WAIT_SLICE", 0.005)
    monkeypatch.setattr(loop, "FIRST_LOOK", 0.001)
    engine = make_engine(executor=StuckExecutor)
    stage = ImpatientStage(looks=1000, end=lambda: None)
    engine.scheduler.attach(stage)
    slices = []

    def answer_others() -> None:
        slices.append(1000 - len(stage.looks))
        if len(slices) == 2:
            engine.executor.finish()

    engine.scheduler.on_wait(answer_others)
    engine.add(make_message(max_tokens=1))
    engine.step()
    assert slices == [2, 4], "after 1 ms and after 3"
