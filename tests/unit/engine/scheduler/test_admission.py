"""Admission answers never (at ingress), later (and why), or ok [admission-answers]."""

import pytest

from tandem_engine.scheduler.prefill_adder import Admission
from tandem_testing.scheduler_builders import Engine, make_engine, make_message

GREEDY_RESERVE = {"init_new_token_ratio": 1.0, "min_new_token_ratio": 1.0}


def why(engine: Engine) -> str:
    return engine.scheduler.stats().head_waits


def test_request_that_never_fits_is_rejected_at_once():  # [admission-answers]
    engine = make_engine(usable_pages=4, page_size=4)
    engine.add(make_message(prompt=[1] * 17, max_tokens=1))
    assert engine.finish().code == "invalid_request"
    assert "16" in engine.finish().error


def test_admission_reason_is_set_only_while_a_request_waits():
    engine = make_engine(max_running_requests=1)
    assert why(engine) == ""
    engine.add(make_message("one", [1, 2], max_tokens=4))
    engine.add(make_message("two", [1, 2], max_tokens=4))
    engine.step(2)
    assert why(engine) == Admission.NO_SEAT.value
    engine.run()
    assert why(engine) == ""


def test_request_without_a_free_row_waits_for_no_row():
    engine = make_engine(max_rows=1)
    for rid in ("one", "two"):
        engine.add(make_message(rid, [1, 2], max_tokens=4))
    engine.step()
    assert why(engine) == "no_row"


def test_budget_of_the_step_is_spent():
    engine = make_engine(max_prefill_tokens=4)
    for rid in ("one", "two"):
        engine.add(make_message(rid, [len(rid), 2, 3, 4], max_tokens=4))
    engine.step()
    assert why(engine) == "budget"


def test_another_prompt_is_half_computed():
    engine = make_engine(chunked_prefill_size=4, max_prefill_tokens=16)
    for rid in ("one", "two"):
        engine.add(make_message(rid, [ord(rid[0]) % 90] * 9, max_tokens=4))
    engine.step()
    assert why(engine) == "chunk_in_progress"


def test_expected_pages_of_running_requests_are_reserved():  # [admission-reserves]
    def after_one_step(ratio: float) -> str:
        settings = {"init_new_token_ratio": ratio, "min_new_token_ratio": min(ratio, 0.01)}
        engine = make_engine(usable_pages=20, page_size=4, **settings)
        engine.add(make_message("running", [1] * 8, max_tokens=57))
        engine.add(make_message("waiting", [2] * 24, max_tokens=2))
        engine.step()
        return why(engine)

    assert after_one_step(1.0) == "no_pages"
    assert after_one_step(0.5) == ""


@pytest.mark.parametrize(("watermark", "expected"), [(0.0, ""), (0.2, "watermark")])
def test_new_requests_leave_the_watermark_free(watermark, expected):
    engine = make_engine(usable_pages=19, page_size=4, watermark=watermark, **GREEDY_RESERVE)
    engine.add(make_message("running", [1] * 8, max_tokens=9))
    engine.add(make_message("waiting", [2] * 52, max_tokens=4))
    engine.step()
    assert why(engine) == expected
    engine.run()
    engine.assert_expected()


def test_alone_a_request_may_have_the_watermark_too():
    engine = make_engine(usable_pages=10, page_size=4, watermark=0.9, **GREEDY_RESERVE)
    engine.add(make_message(prompt=[1] * 20, max_tokens=21))
    engine.run()
    engine.assert_expected()


def test_step_that_put_a_request_back_takes_in_no_new_one():
    engine = make_engine(
        usable_pages=9, page_size=2, enable_mixed_chunk=True, init_new_token_ratio=0.01, min_new_token_ratio=0.01
    )
    for rid in ("old", "new"):
        engine.add(make_message(rid, [len(rid)] * 4, max_tokens=12))
    while not engine.scheduler.tally.retracted:
        engine.step()
    assert why(engine) == "after_retraction"


def test_running_requests_have_their_turn():
    engine = make_engine(max_prefill_tokens=4, chunked_prefill_size=4, usable_pages=200)
    engine.add(make_message("running", [1, 2, 3], max_tokens=30))
    engine.step()
    for number in range(9):
        engine.add(make_message(f"r{number}", [number + 1, 2, 3, 4], max_tokens=1))
    reasons = []
    for _ in range(5):
        engine.step()
        reasons.append(why(engine))
    assert reasons[-1] == "decode_turn"
