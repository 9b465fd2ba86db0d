"""What the scheduler promises to queue stages."""

import pytest

from tandem_engine.forward.batch import ForwardMode
from tandem_engine.messages.outputs import Finish, FinishReason, TransferReport
from tandem_engine.messages.requests import HandoffSide
from tandem_testing.direct_handoff import Pair, make_handoff
from tandem_testing.quiet_stage import QuietStage
from tandem_testing.scheduler_builders import Engine, expected_output, make_engine, make_message

SEND, RECEIVE = HandoffSide.SEND, HandoffSide.RECEIVE


def make_pair(*, delay: int = 0, **settings: object) -> Pair:
    return Pair.of(make_engine(**settings), make_engine(**settings), delay=delay)


def add(pair: Pair, rid: str = "r", prompt=range(1, 12), **params: object) -> None:
    for engine, side in [(pair.prefill, SEND), (pair.decode, RECEIVE)]:
        engine.add(make_message(rid, prompt, handoff=make_handoff(side, f"room-{rid}"), **params))


def merged(pair: Pair, rid: str = "r") -> list[int]:
    """The output as the gateway sees it: the first token from one worker, the rest from the other."""
    outputs = [*pair.prefill.received[rid].outputs, *pair.decode.received[rid].outputs]
    whole: list[int] = []
    for output in outputs:
        assert output.index == len(whole)
        whole += output.token_ids
    return whole


def expected(engine: Engine, rid: str = "r") -> list[int]:
    return expected_output(engine.messages[rid])


@pytest.mark.parametrize("overlap", [False, True])
def test_handed_off_request_continues_on_decode(overlap):
    pair = make_pair(enable_overlap=overlap, delay=3)
    add(pair, max_tokens=9)
    pair.run()
    assert merged(pair) == expected(pair.prefill)
    assert len(pair.prefill.received["r"].tokens) == 1
    assert pair.decode.model.forwards == 8 == pair.decode.scheduler.tally.launched
    pair.prefill.assert_nothing_held()
    pair.decode.assert_nothing_held()


@pytest.mark.parametrize("overlap", [False, True])
def test_request_to_be_sent_never_decodes_here(overlap):
    pair = make_pair(enable_overlap=overlap, delay=2, enable_mixed_chunk=True)
    pair.prefill.add(make_message("local", [5, 6], max_tokens=12))
    add(pair, max_tokens=6)
    pair.run()
    assert pair.prefill.scheduler.tally.output_tokens == 12 + 1
    pair.prefill.assert_expected("local")


def test_chunks_are_reported_to_stage_in_order_when_committed():  # [settled-only-sent]
    pair = make_pair(chunked_prefill_size=4, enable_overlap=True)
    add(pair, max_tokens=3)
    pair.run()
    assert pair.sender.settled["r"] == [4, 8, 11]


def test_request_kept_by_stage_holds_pages_until_release():
    pair = make_pair(delay=5)
    add(pair, max_tokens=3)
    pair.prefill.step(3)
    assert pair.prefill.scheduler.audit().requests == 1
    assert not pair.prefill.scheduler.idle
    pair.run()
    assert pair.prefill.scheduler.audit().requests == 0


def test_pages_in_transfer_are_not_deduplicated_with_cache():
    pair = make_pair(chunked_prefill_size=4, max_prefill_tokens=64, page_size=4)
    pair.prefill.add(make_message("same", range(1, 5), max_tokens=1))
    add(pair, prompt=range(1, 12), max_tokens=3)
    pair.prefill.step()
    first_page = pair.prefill.scheduler.queues.chunked.kv.pages[0]
    assert {first_page} != {*pair.prefill.memory.cache.pages()}
    pair.prefill.step(2)
    (kept,) = pair.sender.live()
    assert kept.kv.pages[0] == first_page
    pair.run()
    assert merged(pair) == expected(pair.prefill)


def test_committed_chunks_in_transfer_enter_the_prefix_cache():
    pair = make_pair(chunked_prefill_size=4, max_prefill_tokens=64, page_size=4, delay=9)
    add(pair, prompt=range(1, 12), max_tokens=3)
    pair.prefill.step()
    kv = pair.prefill.scheduler.queues.chunked.kv
    assert [*pair.prefill.memory.cache.pages()] == kv.pages[:1]
    pair.prefill.add(make_message("same", range(1, 9), max_tokens=1))
    pair.run()
    assert pair.prefill.received["same"].outputs[0].cached_tokens == 4
    assert merged(pair) == expected(pair.prefill)


def cramped(usable_pages: int, chunk: int) -> Engine:
    return make_engine(
        page_size=2,
        radix=False,
        usable_pages=usable_pages,
        init_new_token_ratio=0.01,
        min_new_token_ratio=0.01,
        chunked_prefill_size=chunk,
        enable_mixed_chunk=True,
    )


def test_partly_sent_prompt_is_not_retracted_for_decode():  # [settled-only-sent]
    engine = cramped(15, chunk=1)
    pair = Pair.of(engine, make_engine(page_size=2))
    engine.add(make_message("running", [1, 2], max_tokens=20))
    engine.step(3)
    add(pair, "sent", range(1, 15), max_tokens=2)
    pair.run()
    # The prompt's last token came when the running request needed a page and none was free.
    waited = [batch for batch in engine.executor.batches[2:] if batch.mode is ForwardMode.EXTEND]
    assert [batch.seq_lens.tolist() for batch in waited] == [[14]]
    assert engine.scheduler.tally.retracted == 0
    engine.assert_expected("running")
    assert merged(pair, "sent") == expected(engine, "sent")


def test_newest_fails_when_sent_and_running_lack_pages():  # [last-request-fails]
    engine = cramped(11, chunk=2)
    pair = Pair.of(engine, make_engine(page_size=2))
    engine.add(make_message("running", [1, 2], max_tokens=16))
    engine.step(2)
    engine.clock.time += 1
    add(pair, "sent", range(1, 15), max_tokens=2)
    engine.run()
    assert (engine.finish("sent").code, engine.finish("sent").retryable) == ("out_of_pages", True)
    assert [req.rid for req in pair.sender.aborted_requests] == ["sent"]
    engine.assert_expected("running")
    engine.assert_nothing_held()


def test_stage_does_not_keep_request_finished_at_first_token():
    engine = make_engine()
    stage = QuietStage()
    engine.scheduler.attach(stage)
    engine.add(make_message(max_tokens=1, handoff=make_handoff(SEND, "room")))
    engine.run()
    assert stage.prefilled == [("r", True)]
    engine.assert_nothing_held()


def test_request_to_be_sent_that_no_stage_keeps_decodes_here():
    engine = make_engine(enable_overlap=True)
    engine.add(make_message(max_tokens=6, handoff=make_handoff(SEND, "room")))
    engine.run()
    engine.assert_expected()


def test_both_stages_are_notified_of_abort_once():  # [abort-both-ways]
    pair = make_pair(chunked_prefill_size=2)
    add(pair, max_tokens=9)
    pair.prefill.step(2)
    pair.prefill.scheduler.abort("r")
    pair.decode.scheduler.abort("r")
    pair.run()
    assert [req.rid for req in pair.sender.aborted_requests] == ["r"]
    assert [req.rid for req in pair.receiver.aborted_requests] == ["r"]
    for engine in (pair.prefill, pair.decode):
        assert engine.finish().reason is FinishReason.ABORT
        engine.assert_nothing_held()


def test_abort_reaches_a_request_that_a_stage_keeps():
    pair = make_pair(delay=100)
    add(pair, max_tokens=9)
    pair.prefill.step(4)
    pair.prefill.scheduler.abort("r")
    pair.prefill.step()
    assert pair.prefill.finish().reason is FinishReason.ABORT
    pair.prefill.assert_nothing_held()


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_while_the_first_token_is_in_flight(overlap):
    pair = make_pair(enable_overlap=overlap, delay=100)
    add(pair, max_tokens=9)
    pair.prefill.step()
    pair.prefill.scheduler.abort("r")
    pair.prefill.step(2)
    assert pair.prefill.finish().reason is FinishReason.ABORT
    pair.prefill.assert_nothing_held()


def test_retracted_prebuilt_request_is_recomputed_on_decode():
    pair = make_pair()
    pair.decode = make_engine(force_retract_every=2)
    pair = Pair.of(make_engine(), pair.decode)
    add(pair, max_tokens=9)
    pair.run()
    assert pair.decode.scheduler.tally.retracted > 1
    assert merged(pair) == expected(pair.prefill)


def test_transfer_report_and_cached_tokens_are_sent_once():
    pair = make_pair()
    add(pair, max_tokens=4)
    report = TransferReport(pages=3, bytes=96, pages_reused=0, wait_s=0.5)
    pair.receiver.waiting["room-r"].transfer = report
    pair.receiver.waiting["room-r"].cached_tokens = 8
    pair.run()
    assert [output.transfer for output in pair.decode.received["r"].outputs] == [report, None, None]
    # The prefill worker's own word of it may reach the gateway after the end of the output.
    assert [output.cached_tokens for output in pair.decode.received["r"].outputs] == [8, None, None]


def test_finish_reason_is_found_in_handed_off_tokens():
    pair = make_pair()
    add(pair, max_tokens=4)
    req = pair.receiver.waiting["room-r"]
    req.output_ids[:] = [9, 9, 9]
    assert pair.decode.scheduler.for_stages.stop_of(req) is None
    req.output_ids.append(9)
    assert pair.decode.scheduler.for_stages.stop_of(req).reason is FinishReason.LENGTH
    req.output_ids.clear()
    pair.run()


def test_stage_can_end_a_request_that_it_keeps():
    pair = make_pair()
    pair.decode.add(make_message(handoff=make_handoff(RECEIVE, "room")))
    req = pair.receiver.waiting.pop("room")
    error = Finish(reason=FinishReason.ERROR, code="transfer_error", retryable=True)
    pair.decode.scheduler.for_stages.finish(req, error)
    pair.decode.step()
    assert pair.decode.finish() == error
    assert pair.receiver.aborted_requests == [req]
    assert pair.decode.scheduler.idle


def test_spare_pages_exclude_running_requests_and_queue_head():
    engine = make_engine(
        usable_pages=20, page_size=4, max_running_requests=1, init_new_token_ratio=0.5, min_new_token_ratio=0.5
    )
    assert engine.scheduler.for_stages.spare_pages() == 20
    engine.add(make_message("running", [1] * 8, max_tokens=16))
    engine.step()
    # 8 prompt tokens and one output token have KV or will soon; half of the other 15 are expected: 17 tokens.
    assert engine.scheduler.for_stages.spare_pages() == 20 - 5
    engine.add(make_message("head", [1] * 8, max_tokens=16))
    assert engine.scheduler.for_stages.spare_pages() == 20 - 5 - 4


def test_stage_that_moved_something_counts_as_work():
    class Busy(QuietStage):
        def poll(self) -> bool:
            return True

    engine = make_engine()
    engine.scheduler.attach(Busy())
    assert engine.scheduler.step() is True


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_disaggregated_or_not_the_output_is_the_same(overlap, page_size):
    pair = make_pair(
        enable_overlap=overlap,
        page_size=page_size,
        usable_pages=1 + 400 // page_size,
        chunked_prefill_size=7,
        enable_mixed_chunk=True,
        delay=2,
    )
    prompts = {"a": range(1, 30), "b": [*range(1, 17), 50], "c": [5], "d": range(1, 30), "e": range(40, 58)}
    for number, (rid, prompt) in enumerate(prompts.items()):
        add(pair, rid, prompt, max_tokens=3 + 5 * number, temperature=float(number % 2), seed=number)
        pair.prefill.step(2)
        pair.decode.step(3)
    pair.run()
    for rid in prompts:
        assert merged(pair, rid) == expected(pair.prefill, rid)
    pair.prefill.assert_nothing_held()
    pair.decode.assert_nothing_held()
