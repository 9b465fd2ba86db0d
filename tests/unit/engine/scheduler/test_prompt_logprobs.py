"""Logprobs of prompts through chunks, caches and retractions [logprobs-past-cache] [logprobs-through-chunks]."""

import pytest

from tandem_engine.messages.outputs import TokenLogprob
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.scheduler.prompt_results import PromptLogprobs
from tandem_testing.scheduler_builders import make_engine, make_message

PROMPT = tuple(range(1, 24))


def collection(prompt_len: int, start: int = 0) -> PromptLogprobs:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, logprob_start=start)
    wanted = PromptLogprobs.wanted_by(params, prompt_len)
    assert wanted is not None
    return wanted


def scores(positions: range) -> list[TokenLogprob]:
    return [TokenLogprob(logprob=-float(position)) for position in positions]


@pytest.mark.parametrize("start", [0, 1, 2, 7, 11])
@pytest.mark.parametrize("chunk", range(1, 13))
@pytest.mark.parametrize("cached", [0, 1, 4])
def test_every_position_comes_once_at_every_chunk_size(chunk, start, cached):  # [logprobs-through-chunks]
    wanted, length = collection(12, start), 12
    limit = length - 1 if wanted.longest_match is None else wanted.longest_match
    at = min(cached, limit)
    while at < length:
        stop = min(at + chunk, length)
        positions = wanted.positions(at, stop)
        if positions:
            assert positions.start == wanted.next
            wanted.take(positions.start, scores(positions))
        at = stop
    assert wanted.complete
    expected = [None, *scores(range(1, length))][start:]
    assert wanted.collected == expected


def test_prompt_of_one_token_has_nothing_to_wait_for():
    wanted = collection(1)
    assert (wanted.complete, wanted.collected, wanted.longest_match) == (True, [None], None)
    assert not wanted.positions(0, 1)


def test_tokens_after_the_prompt_are_not_scored():
    assert collection(5).positions(0, 9) == range(1, 5)


def test_gap_is_a_bug_and_not_a_wrong_answer():
    wanted = collection(9)
    with pytest.raises(AssertionError, match="1 is next"):
        wanted.take(2, scores(range(2, 4)))
    with pytest.raises(AssertionError, match="pass the end"):
        wanted.take(1, scores(range(1, 11)))


def test_prompt_logprobs_are_collected_only_on_request():
    assert PromptLogprobs.wanted_by(SamplingParams(max_tokens=1), 9) is None


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 5, 22, 23, 64])
@pytest.mark.parametrize("start", [0, 1, 9, 22])
def test_prompt_logprobs_come_with_first_token_for_any_chunks(overlap, chunk, start):
    engine = make_engine(enable_overlap=overlap, chunked_prefill_size=chunk)
    engine.add(make_message(prompt=PROMPT, max_tokens=4, prompt_logprobs=2, logprob_start=start))
    engine.run()
    engine.assert_expected()
    first, *later = engine.received["r"].outputs
    assert len(first.prompt_logprobs) == len(PROMPT) - start
    assert [output.prompt_logprobs for output in later] == [None] * len(later)
    assert all(len(entry.top) == 2 for entry in first.prompt_logprobs if entry is not None)


@pytest.mark.parametrize(("start", "cached"), [(0, 0), (1, 0), (5, 4), (13, 12), (22, 20)])
def test_cache_is_used_up_to_the_first_token_wanted(start, cached):  # [logprobs-past-cache]
    engine = make_engine(page_size=4)
    engine.add(make_message("warm", PROMPT, max_tokens=2))
    engine.run()
    engine.add(make_message("scored", PROMPT, max_tokens=2, prompt_logprobs=0, logprob_start=start))
    engine.run()
    engine.assert_expected()
    assert engine.received["scored"].outputs[0].cached_tokens == cached


def test_collected_logprobs_are_not_computed_again():
    engine = make_engine(page_size=4, chunked_prefill_size=8, enable_overlap=False)
    engine.add(make_message(prompt=PROMPT, max_tokens=6, prompt_logprobs=0))
    engine.step(2)
    req = engine.scheduler.queues.chunked
    assert req.prompt_logprobs.next == 17
    engine.scheduler.queues.chunked = None
    engine.scheduler.for_stages.release(req)
    engine.scheduler.queues.waiting.return_to_head(req)
    engine.run()
    engine.assert_expected()
    first_again = engine.executor.batches[2]
    assert first_again.positions[0] == 16  # the page that holds the token before position 17 is computed again
    [wanted] = first_again.prompt_positions
    assert wanted.first == 17


def test_forced_retraction_neither_loses_nor_repeats_them():
    engine = make_engine(force_retract_every=1, max_retractions=100, enable_overlap=True, chunked_prefill_size=5)
    for name in ("a", "b", "c"):
        engine.add(make_message(name, PROMPT, max_tokens=6, prompt_logprobs=1))
    engine.run()
    assert engine.scheduler.tally.retracted > 3
    engine.assert_expected()


def test_aborted_prompt_takes_its_logprobs_along():
    engine = make_engine(chunked_prefill_size=4, enable_overlap=True)
    engine.add(make_message("gone", PROMPT, max_tokens=4, prompt_logprobs=0))
    engine.step(3)
    engine.scheduler.abort("gone")
    engine.add(make_message("next", PROMPT, max_tokens=4, prompt_logprobs=0))
    engine.run()
    engine.assert_expected("next")
    assert engine.received["gone"].prompt_logprobs is None
    engine.assert_nothing_held()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 0, "logprob_start": 23}, "logprob_start"),
        ({"logprob_start": 1}, "logprob_start"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_bounds_are_checked_at_admission(fields, param):  # [logprobs-bounded]
    engine = make_engine()
    engine.add(make_message(prompt=PROMPT, **fields))
    finish = engine.finish()
    assert (finish.code, finish.param) == ("invalid_request", param)


def test_more_logprobs_than_one_message_may_hold_are_refused(monkeypatch):
    monkeypatch.setattr("tandem_engine.messages.sampling.MAX_PROMPT_LOGPROBS", 40)
    engine = make_engine()
    engine.add(make_message("many", PROMPT, prompt_logprobs=1))
    assert "46 logprobs, the limit is 40" in engine.finish("many").error
    engine.add(make_message("fewer", PROMPT, prompt_logprobs=1, logprob_start=3))
    engine.run()
    engine.assert_expected("fewer")
