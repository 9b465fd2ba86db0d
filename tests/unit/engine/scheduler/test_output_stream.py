"""What clients receive, and when."""

import pytest

from tandem_engine.messages.outputs import CacheHits, FinishReason
from tandem_testing.scheduler_builders import expected_output, make_engine, make_message


def test_tokens_are_streamed_in_the_step_that_completes_them():
    engine = make_engine()
    engine.add(make_message(max_tokens=3))
    for tokens in (1, 2, 3):
        engine.step()
        assert len(engine.output()) == tokens


def test_positions_count_from_the_start_of_the_whole_output():
    engine = make_engine()
    engine.add(make_message(max_tokens=5, resume=(7, 8)))
    engine.run()
    assert [output.index for output in engine.received["r"].outputs] == [2, 3, 4]
    engine.assert_expected()


def test_middle_chunk_streams_nothing():  # [middle-chunk-silent]
    engine = make_engine(chunked_prefill_size=2)
    engine.add(make_message(prompt=range(1, 8), max_tokens=1))
    engine.step(3)
    assert engine.deliveries == []


def test_one_delivery_per_client_and_step():
    engine = make_engine()
    for rid, client in [("a1", b"a"), ("a2", b"a"), ("b1", b"b")]:
        engine.add(make_message(rid, max_tokens=2), client)
    engine.step()
    assert [(client, [output.rid for output in outputs]) for client, outputs in engine.deliveries] == [
        (b"a", ["a1", "a2"]),
        (b"b", ["b1"]),
    ]


def test_last_token_and_the_finish_come_together():
    engine = make_engine()
    engine.add(make_message(max_tokens=2))
    engine.run()
    last = engine.received["r"].outputs[-1]
    assert len(last.token_ids) == 1
    assert last.finish.reason is FinishReason.LENGTH


def test_timings_and_cache_hits_come_with_the_first_output_only():
    engine = make_engine(max_running_requests=1, page_size=4)
    engine.add(make_message("before", range(1, 10), max_tokens=1))
    engine.add(make_message(prompt=range(1, 10), max_tokens=3))
    engine.clock.time = 1.0
    engine.step()
    engine.clock.time = 3.0
    engine.run()
    first, *rest = engine.received["r"].outputs
    assert (first.queue_s, first.prefill_s, first.cached_tokens, first.cache_hits) == (3.0, 0.0, 8, CacheHits())
    assert all(output.queue_s is output.prefill_s is output.cached_tokens is None for output in rest)
    assert all(output.cache_hits is None for output in rest)


def test_retracted_request_does_not_repeat_its_first_output():
    engine = make_engine(force_retract_every=1)
    engine.add(make_message(max_tokens=9))
    engine.run()
    assert [output.cached_tokens for output in engine.received["r"].outputs][1:] == [None] * 8


@pytest.mark.parametrize("overlap", [False, True])
def test_logprobs_stay_with_their_tokens(overlap):  # [one-cut]
    engine = make_engine(enable_overlap=overlap, force_retract_every=3)
    engine.add(make_message("none", [4, 5], max_tokens=7))
    engine.add(make_message("some", max_tokens=7, logprobs=2))
    engine.add(make_message("zero", [9], max_tokens=7, logprobs=0))
    engine.add(make_message("named", [8, 7], max_tokens=7, logprobs=3, logprob_token_ids=(40, 6)))
    engine.run()
    assert all(output.logprobs is None for output in engine.received["none"].outputs)
    named = [logprob.top for output in engine.received["named"].outputs for logprob in output.logprobs]
    assert named == [((40, -42.0), (6, -8.0))] * 7
    for rid, top in [("some", 2), ("zero", 0)]:
        for output in engine.received[rid].outputs:
            assert [logprob.logprob for logprob in output.logprobs] == [-1.0 - t / 97 for t in output.token_ids]
            assert all(len(logprob.top) == top for logprob in output.logprobs)
    engine.assert_expected()


def test_output_cut_at_a_stop_has_as_many_logprobs_as_tokens():  # [one-cut]
    engine = make_engine(enable_overlap=True)
    stop = expected_output(make_message(max_tokens=9))[4]
    engine.add(make_message(max_tokens=9, stop_token_ids=(stop,), logprobs=0))
    engine.run()
    assert len(engine.received["r"].logprobs) == len(engine.output()) <= 5


def test_resumed_request_continues_the_uninterrupted_output():
    whole = expected_output(make_message(max_tokens=12, temperature=0.8, seed=3))
    for cut in range(1, 12):
        engine = make_engine(enable_overlap=True, enable_mixed_chunk=True)
        engine.add(make_message(max_tokens=12, temperature=0.8, seed=3, resume=whole[:cut]))
        engine.run()
        assert engine.output() == whole
