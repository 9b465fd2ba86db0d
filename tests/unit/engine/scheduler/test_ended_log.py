"""What an engine reports of traced requests: once each, whatever became of them, and nothing of others."""

import pytest

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.base.names import RequestId
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.messages.requests import HandoffSide, TraceContext, attempt_id, request_id_of
from tandem_engine.messages.stats import EndedRequest
from tandem_engine.scheduler import finishing
from tandem_testing.disagg_pair import HOLD_TIMEOUT, PROMPT, Pair, make_pair
from tandem_testing.scheduler_builders import Engine, make_engine, make_message

TRACE = TraceContext(traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
UNSAMPLED = TraceContext(traceparent=f"00-{'a' * 32}-{'b' * 16}-00")
NOW_NS = 1_700_000_000_000_000_000


def watched(engine: Engine) -> Engine:
    engine.scheduler.ended.wanted = True
    engine.scheduler.ended.unix_ns = lambda: NOW_NS
    return engine


def only(engine: Engine) -> EndedRequest:
    (ended,) = engine.scheduler.ended.take()
    return ended


def test_request_is_reported_once_with_moments_in_their_order():
    engine = watched(make_engine())
    engine.add(make_message("r-0-0", [1, 2, 3], max_tokens=4, trace=TRACE))
    engine.clock.time += 2.0
    engine.run()
    ended = only(engine)
    assert (ended.rid, ended.context, ended.finish) == ("r-0-0", TRACE, FinishReason.LENGTH)
    assert ended.arrived_ns <= NOW_NS - 2_000_000_000
    assert ended.arrived_ns <= ended.scheduled_ns <= ended.first_token_ns <= ended.ended_ns == NOW_NS
    assert (ended.prompt_tokens, ended.output_tokens, ended.max_tokens) == (3, 4, 4)
    assert engine.scheduler.ended.take() == []


def test_resumed_tokens_are_reported_separately():
    engine = watched(make_engine())
    engine.add(make_message("r", [1, 2, 3], resume=[4, 5], max_tokens=6, trace=TRACE))
    engine.run()
    ended = only(engine)
    assert (ended.resumed_tokens, ended.output_tokens) == (2, 4)


@pytest.mark.parametrize("trace", [None, UNSAMPLED])
def test_unsampled_trace_is_not_logged(trace):
    engine = watched(make_engine())
    engine.add(make_message("r", [1, 2, 3], trace=trace))
    engine.run()
    assert engine.scheduler.ended.take() == []


def test_finished_log_is_empty_without_reporting():
    engine = make_engine()
    engine.add(make_message("r", [1, 2, 3], trace=TRACE))
    engine.run()
    assert engine.scheduler.ended.take() == []


def test_aborted_request_is_in_the_ended_log():
    engine = watched(make_engine())
    engine.add(make_message("r", [1, 2, 3], max_tokens=9, trace=TRACE))
    engine.step()
    engine.scheduler.abort(RequestId("r"))
    engine.run()
    assert only(engine).finish is FinishReason.ABORT


def test_refused_request_is_in_the_ended_log_without_a_scheduling_time():
    engine = watched(make_engine())
    engine.add(make_message("r", [], trace=TRACE))
    engine.step()
    ended = only(engine)
    assert (ended.finish, ended.error) == (FinishReason.ERROR, "invalid_request")
    assert ended.scheduled_ns is ended.first_token_ns is ended.cached_tokens is None


@pytest.mark.parametrize(
    "trace",
    [
        TraceContext(traceparent=""),
        TraceContext(traceparent="00-" + "a" * 32 + "-" + "0" * 16 + "-01"),
        TraceContext(traceparent="00-" + "0" * 32 + "-" + "b" * 16 + "-01"),
        TraceContext(traceparent="00-" + "A" * 32 + "-" + "b" * 16 + "-01"),
        TraceContext(traceparent=TRACE.traceparent + "\n"),
        TraceContext(traceparent=TRACE.traceparent, tracestate="k=" + "v" * 511),
        TraceContext(traceparent=TRACE.traceparent, tracestate="k=\nforged"),
    ],
)
def test_invalid_trace_context_rejects_request_and_is_not_logged(trace):
    with pytest.raises(InvalidRequestError, match="trace"):
        trace.check()
    engine = watched(make_engine())
    engine.add(make_message("r", [1, 2, 3], trace=trace))
    engine.step()
    (output,) = engine.received["r"].outputs
    assert (output.finish.code, output.finish.param) == ("invalid_request", "trace")
    assert engine.scheduler.ended.take() == []


def test_uncollected_reports_are_bounded_and_counted(monkeypatch):
    monkeypatch.setattr(finishing, "MAX_KEPT", 2)
    engine = watched(make_engine())
    for number in range(3):
        engine.add(make_message(f"r{number}", [1, 2, 3], max_tokens=1, trace=TRACE))
    engine.run()
    assert len(engine.scheduler.ended.take()) == 2
    assert engine.scheduler.ended.lost == 1


def handed_over(**request: object) -> tuple[Pair, EndedRequest, EndedRequest]:
    pair = make_pair()
    for side in (pair.prefill, pair.decode):
        watched(side.engine)
    pair.submit("r", PROMPT, trace=TRACE, **request)
    pair.run(seconds_per_turn=0.01)
    return pair, only(pair.prefill.engine), only(pair.decode.engine)


def test_handoff_is_logged_by_both_sides_with_equal_transfer():
    pair, sent, received = handed_over(max_tokens=5)
    pair.assert_clean()
    assert (sent.side, received.side) == (HandoffSide.SEND, HandoffSide.RECEIVE)
    assert (sent.finish, received.finish) == (None, FinishReason.LENGTH)
    assert sent.transfer.bytes == received.transfer.bytes > 0
    assert sent.first_token_ns <= sent.transferred_ns <= sent.ended_ns
    assert received.arrived_ns <= received.transferred_ns <= received.first_token_ns <= received.ended_ns
    assert received.scheduled_ns is None
    assert (sent.output_tokens, received.output_tokens) == (1, 5)


def test_handoff_finished_at_first_token_logs_no_transfer():
    _, sent, received = handed_over(max_tokens=1)
    assert (sent.finish, received.finish) == (FinishReason.LENGTH, None)
    assert sent.transfer is received.transfer is None


def test_receiver_abort_before_transfer_is_logged_as_abort():
    pair = make_pair()
    watched(pair.decode.engine)
    pair.submit_decode("r", PROMPT, trace=TRACE)
    pair.turn(3)
    pair.decode.engine.scheduler.abort(RequestId("r"))
    pair.run()
    ended = only(pair.decode.engine)
    assert (ended.finish, ended.transfer) == (FinishReason.ABORT, None)


def test_prompt_without_receiver_is_logged_without_transfer():
    pair = make_pair()
    watched(pair.prefill.engine)
    pair.submit_prefill("r", PROMPT, max_tokens=3, trace=TRACE)
    pair.turn(5)
    assert pair.prefill.engine.scheduler.ended.take() == [], "it is kept for its transfer"
    pair.pass_time(HOLD_TIMEOUT)
    pair.run()
    ended = only(pair.prefill.engine)
    assert (ended.side, ended.finish, ended.transfer) == (HandoffSide.SEND, None, None)


def test_finished_request_is_logged_once():
    engine = watched(make_engine())
    engine.add(make_message("r", [1, 2, 3], max_tokens=1, trace=TRACE))
    req = engine.scheduler.queues.requests[RequestId("r")]
    engine.run()
    engine.scheduler.ended.note(req, Finish(reason=FinishReason.STOP))
    assert only(engine).finish is FinishReason.LENGTH


@pytest.mark.parametrize("request_id", ["a1", "a-1-2", "with\nline"])
def test_request_of_an_attempt_is_known_by_its_id(request_id):
    assert request_id_of(attempt_id(request_id, 3, 12)) == request_id


def test_id_of_another_form_is_its_own_request():
    assert request_id_of("completion") == "completion"


def test_log_records_of_an_engine_name_the_request_and_its_trace(caplog):
    engine = make_engine()
    for _ in range(2):
        engine.add(make_message("a1b2-0-3", [1, 2, 3], trace=UNSAMPLED))
    (record,) = [record for record in caplog.records if "arrived twice" in record.message]
    assert record.fields == {"request_id": "a1b2", "rid": "a1b2-0-3", "trace_id": "a" * 32}


def test_handoff_that_fails_is_logged_with_its_request(caplog):
    pair = make_pair()
    pair.submit_prefill("a1b2-0-0", PROMPT, max_tokens=3)
    pair.turn(5)
    pair.pass_time(HOLD_TIMEOUT)
    pair.run()
    (record,) = [record for record in caplog.records if "handoff to" in record.message]
    assert record.fields == {"request_id": "a1b2", "rid": "a1b2-0-0"}
