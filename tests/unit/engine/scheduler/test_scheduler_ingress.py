"""What is accepted, and how the rest is refused."""

import pytest

from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import GenerateRequest, HandoffSide
from tandem_testing.disagg_network import make_peer
from tandem_testing.disagg_pair import handoff
from tandem_testing.quiet_stage import QuietStage
from tandem_testing.scheduler_builders import VOCAB, Engine, make_engine, make_message


def refusal(engine: Engine, message: GenerateRequest):
    engine.add(message, b"client")
    engine.step()
    (output,) = engine.received[message.rid].outputs
    assert output.finish.reason is FinishReason.ERROR
    assert output.token_ids == ()
    assert engine.scheduler.idle
    return output.finish


@pytest.mark.parametrize(
    ("message", "param", "text"),
    [
        (make_message(prompt=[]), "input_ids", "empty"),
        (make_message(prompt=[1, VOCAB]), "input_ids", str(VOCAB)),
        (make_message(prompt=[1, -1]), "input_ids", "-1"),
        (make_message(resume=[VOCAB + 3], max_tokens=9), "resume_ids", str(VOCAB + 3)),
        (make_message(prompt=[1] * 64, max_tokens=1), "input_ids", "at most 63"),
        (make_message(prompt=[1] * 60, max_tokens=5), "max_tokens", "room for 4"),
        (make_message(temperature=3.0), "temperature", "between 0.0 and 2.0"),
        (make_message(stop_token_ids=(VOCAB,)), "stop_token_ids", str(VOCAB - 1)),
        (make_message(deadline_s=float("nan")), "deadline_s", "finite"),
        (make_message(deadline_s=float("inf")), "deadline_s", "finite"),
        (make_message(handoff=handoff(HandoffSide.SEND, make_peer("d"), "")), "handoff", "1 to 256 bytes"),
        (make_message(handoff=handoff(HandoffSide.SEND, make_peer("d"), "x" * 257)), "handoff", "1 to 256 bytes"),
        (make_message(handoff=handoff(HandoffSide.RECEIVE, make_peer("p"), "room", -1)), "handoff", "got -1"),
        (make_message(handoff=handoff(HandoffSide.RECEIVE, make_peer("p"), "room", 2**60)), "handoff", "generation"),
    ],
)
def test_invalid_request_error_names_field_and_limit(message, param, text):
    finish = refusal(make_engine(context_length=64), message)
    assert (finish.code, finish.param, finish.retryable) == ("invalid_request", param, False)
    assert text in finish.error


def test_longest_request_that_fits_the_context_is_served():
    engine = make_engine(context_length=64)
    engine.add(make_message(prompt=[1] * 63, max_tokens=1))
    engine.run()
    engine.assert_expected()


def test_request_larger_than_the_whole_pool_is_never_admitted():  # [admission-answers]
    engine = make_engine(usable_pages=4, page_size=4)
    assert engine.scheduler.max_request_tokens == 17
    assert refusal(engine, make_message("large", [1] * 8, max_tokens=10)).param == "max_tokens"
    engine.add(make_message("exact", [1] * 8, max_tokens=9))
    engine.run()
    engine.assert_expected("exact")


def test_full_queue_rejects_with_retry_hint():
    engine = make_engine(max_queued_requests=2)
    engine.add(make_message("one"))
    engine.add(make_message("two"))
    engine.add(make_message("three"))
    engine.step()
    finish = engine.finish("three")
    assert (finish.code, finish.retryable) == ("queue_full", True)
    engine.run()
    engine.assert_expected("one", "two")


def test_stop_strings_need_a_tokenizer():
    finish = refusal(make_engine(with_text=False), make_message(stop=("x",)))
    assert (finish.code, finish.param) == ("invalid_request", "stop")


def test_draining_engine_finishes_requests_and_admits_none():
    engine = make_engine()
    engine.add(make_message("early", max_tokens=5))
    engine.step()
    engine.scheduler.drain()
    engine.add(make_message("late"))
    engine.run()
    assert (engine.finish("late").code, engine.finish("late").retryable) == ("draining", True)
    engine.assert_expected("early")


def test_second_request_under_a_live_id_is_ignored(caplog):
    engine = make_engine()
    engine.add(make_message(max_tokens=4))
    engine.scheduler.add(make_message(prompt=[9, 9], max_tokens=4))
    engine.run()
    engine.assert_expected()
    assert "arrived twice" in caplog.text


def test_resumed_output_that_is_complete_ends_at_once():
    engine = make_engine()
    engine.add(make_message(max_tokens=2, resume=(5, 6)))
    engine.run()
    assert engine.finish().reason is FinishReason.LENGTH
    assert engine.executor.batches == []


def test_stages_are_notified_of_rejected_requests():  # [abort-both-ways]
    engine = make_engine()
    stage = QuietStage()
    engine.scheduler.attach(stage)
    refusal(engine, make_message(prompt=[]))
    assert stage.aborted_rids == ["r"]


def test_counters_of_received_and_finished_requests():
    engine = make_engine()
    engine.add(make_message("served", max_tokens=3))
    engine.add(make_message("aborted", max_tokens=3))
    engine.add(make_message("refused", prompt=[]))
    engine.scheduler.abort("aborted")
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.requests_total, stats.refused_total, stats.aborted_total, stats.failed_total) == (2, 1, 1, 0)
    assert (stats.prompt_tokens_total, stats.output_tokens_total) == (3, 3)
    assert (stats.running, stats.waiting, stats.waiting_tokens) == (0, 0, 0)


def test_waiting_tokens_are_queued_plus_uncomputed_chunked_ones():
    engine = make_engine(chunked_prefill_size=4, max_prefill_tokens=4)
    engine.add(make_message("chunked", [1] * 10))
    engine.add(make_message("queued", [2] * 7))
    engine.step()
    assert engine.scheduler.stats().waiting_tokens == 6 + 7


def test_oldest_wait_is_of_first_unstarted_request():
    engine = make_engine(chunked_prefill_size=4, max_prefill_tokens=4)
    engine.add(make_message("chunked", [1] * 10))
    engine.step()
    engine.add(make_message("queued", [2] * 7))
    engine.add(make_message("later", [3] * 7))
    (first, _) = engine.scheduler.queues.waiting
    assert engine.scheduler.stats().oldest_wait_s == engine.scheduler.clock.now() - first.arrived_at
    engine.run()
    assert engine.scheduler.stats().oldest_wait_s == 0.0
