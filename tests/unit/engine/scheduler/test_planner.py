"""What goes into a step: prefill and decode, one batch after the other."""

import pytest

from tandem_engine.forward.batch import ForwardMode
from tandem_engine.scheduler.planner import MAX_PREFILL_STREAK
from tandem_testing.scheduler_builders import Engine, make_engine, make_message

EXTEND, DECODE, MIXED = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED


def modes(engine: Engine) -> list[ForwardMode]:
    return [batch.mode for batch in engine.executor.batches]


def test_prefill_goes_before_decode():  # [prefill-first]
    engine = make_engine()
    engine.add(make_message("one", [1, 2, 3], max_tokens=4))
    engine.step(2)
    engine.add(make_message("two", [4, 5], max_tokens=4))
    engine.step(2)
    assert modes(engine) == [EXTEND, DECODE, EXTEND, DECODE]
    assert engine.executor.batches[-1].num_sequences == 2


def test_mixed_step_orders_prefill_rows_before_decode_rows():  # [mixed-equals-apart]
    engine = make_engine(enable_mixed_chunk=True)
    engine.add(make_message("one", [1, 2, 3], max_tokens=4))
    engine.step()
    engine.add(make_message("two", [4, 5], max_tokens=4))
    engine.step()
    batch = engine.executor.batches[-1]
    assert batch.mode is MIXED
    assert batch.num_extend == 1
    assert batch.extend_lens.tolist() == [2, 1]
    # A decode is an extend of length one whose prefix is everything but the newest token.
    assert (batch.seq_lens - batch.extend_lens).tolist() == [0, 3]
    assert batch.sample_index.tolist() == [0, 1]


def test_decode_waits_at_most_max_prefill_streak_steps():
    engine = make_engine(max_prefill_tokens=4, chunked_prefill_size=4, usable_pages=200)
    engine.add(make_message("running", [1, 2, 3], max_tokens=30))
    engine.step()
    for number in range(30):
        engine.add(make_message(f"r{number}", [number + 1, 2, 3, 4], max_tokens=1))
    engine.run()
    streaks = "".join("x" if mode is EXTEND else " " for mode in modes(engine)[1:]).split()
    assert max(len(streak) for streak in streaks) == MAX_PREFILL_STREAK
    engine.assert_expected()


def test_prefill_streak_is_unbounded_without_decodes():
    engine = make_engine(max_prefill_tokens=4, chunked_prefill_size=4)
    engine.add(make_message(prompt=range(1, 41), max_tokens=1))
    engine.run()
    assert modes(engine) == [EXTEND] * 10


def test_finished_request_leaves_at_once_and_frees_pages():  # [step-budget]
    engine = make_engine(radix=False)
    engine.add(make_message("short", [1, 2, 3], max_tokens=2))
    engine.add(make_message("long", [4, 5, 6], max_tokens=6))
    engine.step(2)
    assert engine.finish("short") is not None
    assert engine.scheduler.audit().requests == 1
    engine.step()
    assert engine.executor.batches[-1].num_sequences == 1


def test_idle_engine_launches_nothing_and_reports_idle():
    engine = make_engine()
    assert engine.scheduler.idle
    assert engine.scheduler.step() is False
    assert engine.executor.batches == []


def test_full_engine_fills_its_seats_again_as_requests_end():  # [admission-not-latched]
    engine = make_engine(max_running_requests=3)
    for number in range(9):
        engine.add(make_message(f"r{number}", [number + 1], max_tokens=1 + number % 4))
    engine.run()
    engine.assert_expected()


def test_request_finished_at_first_token_never_decodes():  # [finished-rows-filtered]
    engine = make_engine(enable_overlap=True)
    engine.add(make_message("one", [1, 2, 3], max_tokens=1))
    engine.add(make_message("two", [4, 5], max_tokens=3))
    engine.run()
    assert [batch.num_sequences for batch in engine.executor.batches] == [2, 1, 1]


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_wait_when_all_rows_are_taken_and_then_run(overlap):
    engine = make_engine(max_rows=2, enable_overlap=overlap)
    for number in range(6):
        engine.add(make_message(f"r{number}", [number + 1, 5], max_tokens=3))
    engine.run()
    engine.assert_expected()
    engine.assert_nothing_held()


def test_admission_reserves_expected_output_of_running_requests():  # [admission-reserves]
    tight = {"usable_pages": 12, "page_size": 4, "min_new_token_ratio": 0.01}
    prompts = [("one", [1] * 8), ("two", [2] * 8)]
    for ratio, running in [(1.0, 1), (0.01, 2)]:
        engine = make_engine(init_new_token_ratio=ratio, **tight)
        for rid, prompt in prompts:
            engine.add(make_message(rid, prompt, max_tokens=28))
        engine.step()
        assert len(engine.scheduler.queues.running) == running


def test_sole_request_is_admitted_despite_expected_output():
    engine = make_engine(usable_pages=8, page_size=4, init_new_token_ratio=1.0)
    engine.add(make_message(prompt=[1] * 8, max_tokens=25))
    engine.run()
    engine.assert_expected()


def test_new_token_ratio_decays_per_decode_and_resets():
    engine = make_engine(
        usable_pages=10, page_size=4, init_new_token_ratio=0.5, min_new_token_ratio=0.1, new_token_ratio_decay_steps=10
    )
    ratio = engine.scheduler._shared.ratio
    engine.add(make_message("one", [1] * 8, max_tokens=30))
    engine.step(6)
    assert ratio.value == pytest.approx(0.5 - 5 * 0.04)
    engine.step(20)
    assert ratio.value == 0.1
    ratio.reset()
    assert ratio.value == 0.5
