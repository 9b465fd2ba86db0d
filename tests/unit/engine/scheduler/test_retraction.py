"""Requests that are put back for want of memory [retraction-resumes]."""

import pytest

from tandem_engine.messages.kv_events import BASE_SPACE
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.scheduler.request import Request
from tandem_engine.scheduler.retraction import decode_pages_fit
from tandem_testing.quiet_stage import QuietStage
from tandem_testing.scheduler_builders import Engine, expected_output, make_engine, make_message

TIGHT = {"page_size": 2, "init_new_token_ratio": 0.01, "min_new_token_ratio": 0.01, "radix": False}


def add_two(engine: Engine, *, tokens: int = 12, **second: object) -> None:
    """Two requests of four prompt tokens each."""
    engine.add(make_message("old", [1, 2, 3, 4], max_tokens=tokens))
    engine.clock.time += 1
    engine.add(make_message("new", [5, 6, 7, 8], max_tokens=tokens, **second))


def run_until_retracted(engine: Engine) -> None:
    while not engine.scheduler.tally.retracted:
        engine.step()


@pytest.mark.parametrize("overlap", [False, True])
def test_newest_request_is_retracted_first_and_output_is_equal(overlap):
    engine = make_engine(usable_pages=9, enable_overlap=overlap, **TIGHT)
    add_two(engine)
    run_until_retracted(engine)
    assert [req.rid for req in engine.scheduler.queues.waiting] == ["new"]
    engine.run()
    engine.assert_expected()
    engine.assert_nothing_held()


def test_lower_priority_is_retracted_before_newer_request():
    engine = make_engine(usable_pages=9, **TIGHT)
    add_two(engine, priority=1)
    run_until_retracted(engine)
    assert [req.rid for req in engine.scheduler.queues.waiting] == ["old"]


def test_retracted_request_returns_to_queue_head_beyond_limit():  # [retraction-bounded]
    engine = make_engine(usable_pages=9, max_queued_requests=1, max_running_requests=2, **TIGHT)
    for rid in ("old", "new"):
        engine.add(make_message(rid, [len(rid)] * 4, max_tokens=12))
        engine.clock.time += 1
        engine.step()
    engine.add(make_message("queued", [9, 9, 9, 9], max_tokens=12))
    run_until_retracted(engine)
    assert [req.rid for req in engine.scheduler.queues.waiting] == ["new", "queued"]
    engine.run()
    engine.assert_expected()


def test_requests_retracted_in_one_plan_keep_their_order():
    engine = make_engine(usable_pages=12, **TIGHT)
    for number in range(4):
        engine.add(make_message(f"r{number}", [number + 1] * 4, max_tokens=14))
        engine.clock.time += 1
    while engine.scheduler.tally.retracted < 2:
        engine.step()
    rids = [req.rid for req in engine.scheduler.queues.waiting]
    assert rids == sorted(rids)
    engine.run()
    engine.assert_expected()


def test_request_over_max_retractions_fails_retryable():  # [retraction-bounded]
    engine = make_engine(usable_pages=9, max_retractions=0, **TIGHT)
    add_two(engine)
    engine.run()
    assert engine.finish("new").reason is FinishReason.ERROR
    assert engine.finish("new").code == "out_of_pages"
    assert engine.finish("new").retryable
    engine.assert_expected("old")
    engine.assert_nothing_held()


def test_forced_retractions_do_not_count_towards_the_limit():
    engine = make_engine(force_retract_every=1, max_retractions=0)
    engine.add(make_message(max_tokens=10))
    engine.run()
    assert engine.scheduler.tally.retracted == 4
    engine.assert_expected()


def test_last_request_without_pages_fails_retryable():  # [last-request-fails]
    engine = make_engine(usable_pages=8, **TIGHT)
    engine.scheduler.attach(QuietStage(held=engine.memory.reserve_pages(4)))
    engine.add(make_message(prompt=[1, 2, 3, 4], max_tokens=12))
    engine.run()
    assert engine.finish().code == "out_of_pages"
    assert engine.finish().retryable
    assert engine.output() == expected_output(engine.messages["r"])[: len(engine.output())] != []
    engine.assert_nothing_held()


def test_last_request_waits_while_a_stage_will_give_pages_back():
    engine = make_engine(usable_pages=8, **TIGHT)
    kept = Request(rid="kept", origin_input_ids=(1,), sampling=SamplingParams(max_tokens=1))
    kept.kv = engine.memory.begin([1], space=BASE_SPACE, max_match=0)
    assert engine.memory.ensure(kept.kv, 8)
    stage = QuietStage(kept=[kept])
    engine.scheduler.attach(stage)
    engine.add(make_message(prompt=[1, 2, 3, 4], max_tokens=12))
    engine.step(20)
    assert engine.finish() is None
    stage.kept = []
    engine.scheduler.for_stages.release(kept)
    engine.run()
    engine.assert_expected()


def test_last_request_without_pages_does_not_wait_for_idle_stage():  # [last-request-fails]
    engine = make_engine(usable_pages=8, **TIGHT)
    waiting = Request(rid="kept", origin_input_ids=(1,), sampling=SamplingParams(max_tokens=1))
    engine.scheduler.attach(QuietStage(held=engine.memory.reserve_pages(4), kept=[waiting]))
    engine.add(make_message(prompt=[1, 2, 3, 4], max_tokens=12))
    engine.step(20)
    assert engine.finish().code == "out_of_pages"


def test_no_retraction_while_request_in_flight_is_finishing():  # [finish-before-retract]
    engine = make_engine(usable_pages=8, enable_overlap=True, **TIGHT)
    engine.add(make_message("ending", [1, 2, 3, 4], max_tokens=5))
    engine.add(make_message("going-on", [5, 6, 7, 8], max_tokens=9))
    engine.run()
    assert engine.scheduler.tally.retracted == 0
    engine.assert_expected()


@pytest.mark.parametrize("overlap", [False, True])
def test_chunked_prefill_is_retracted_for_running_requests(overlap):
    engine = make_engine(
        usable_pages=12,
        chunked_prefill_size=2,
        max_prefill_tokens=2,
        enable_mixed_chunk=True,
        enable_overlap=overlap,
        **TIGHT,
    )
    engine.add(make_message("running", [1, 2], max_tokens=20))
    engine.step(2)
    engine.clock.time += 1
    engine.add(make_message("long", [3] * 16, max_tokens=2))
    run_until_retracted(engine)
    assert [req.rid for req in engine.scheduler.queues.waiting] == ["long"]
    assert engine.scheduler.queues.chunked is None
    engine.run()
    engine.assert_expected()
    engine.assert_nothing_held()


def test_step_with_retraction_admits_no_request():  # [swapped-first]
    engine = make_engine(force_retract_every=3, enable_mixed_chunk=True)
    add_two(engine)
    run_until_retracted(engine)
    assert engine.executor.batches[-1].num_extend == 0
    assert engine.executor.batches[-1].num_sequences == 1


def test_retraction_happens_exactly_if_memory_check_fails():  # [one-memory-check]
    engine = make_engine(usable_pages=9, **TIGHT)
    add_two(engine)
    while not engine.scheduler.tally.retracted:
        running = [req for req in engine.scheduler.queues.running if req.finished is None]
        fits = decode_pages_fit(engine.memory, running)
        engine.step()
        assert fits == (engine.scheduler.tally.retracted == 0)


def test_no_retraction_while_step_of_request_is_in_flight():  # [settle-before-retract]
    engine = make_engine(usable_pages=9, enable_overlap=True, **TIGHT)
    add_two(engine)
    run_until_retracted(engine)
    (waiting,) = engine.scheduler.queues.waiting
    assert (waiting.steps_in_flight, waiting.tokens_in_flight, waiting.launched_len) == (0, 0, 0)
    assert waiting.kv is None


def test_retracted_request_reuses_its_pages_from_prefix_cache():  # [retraction-resumes]
    engine = make_engine(page_size=4, force_retract_every=4)
    engine.add(make_message(prompt=range(1, 9), max_tokens=6))
    engine.run()
    extends = [batch for batch in engine.executor.batches if batch.num_extend]
    assert [batch.extend_lens.tolist() for batch in extends] == [[8], [1]]
    engine.assert_expected()
