"""Where outputs end [stop-order]."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.scheduler.stop import Cut, ModelFacts, StopRule
from tandem_testing.scheduler_builders import EOS, VOCAB, decode_text

RULE = StopRule(
    model=ModelFacts(vocab_size=VOCAB, eos_token_ids=frozenset({EOS, 96}), context_length=100),
    decode_text=decode_text,
)
A, B, C, D = range(26, 30)  # not EOS, and letters a to d


def cut(run: list[int], outputs: list[int] = (), *, prompt_len: int = 4, max_tokens: int = 50, **params: object) -> Cut:
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return RULE.cut_at_stop(sampling, prompt_len=prompt_len, outputs=list(outputs), run=run)


def test_run_of_tokens_without_a_stop_is_kept_whole():
    assert cut([A, B, C]) == Cut(keep=3, finish=None)


@pytest.mark.parametrize("eos", [EOS, 96])
def test_every_eos_id_of_the_model_stops(eos):
    end = cut([A, eos, B])
    assert (end.keep, end.finish.reason, end.finish.matched_stop) == (2, FinishReason.STOP, None)


def test_eos_is_an_ordinary_token_when_ignored():
    assert cut([EOS], ignore_eos=True).finish is None


def test_stop_id_is_named():
    end = cut([C], stop_token_ids=(B, C))
    assert (end.finish.reason, end.finish.matched_stop) == (FinishReason.STOP, C)


def test_ignored_eos_still_stops_when_it_is_a_stop_id():
    assert cut([EOS], ignore_eos=True, stop_token_ids=(EOS,)).finish.matched_stop == EOS


def test_eos_comes_before_max_tokens_at_the_same_token():  # [stop-order]
    assert cut([EOS], [A], max_tokens=2).finish.reason is FinishReason.STOP


def test_max_tokens_and_context_end_with_length():
    assert cut([A], [B], max_tokens=2).finish.reason is FinishReason.LENGTH
    assert cut([A], [B], prompt_len=98).finish.reason is FinishReason.LENGTH


def test_stop_string_at_last_token_wins_over_length():
    assert cut([B], [A], max_tokens=2, stop=("ab",)).finish.matched_stop == "ab"


def test_earliest_event_of_a_run_wins():  # [earliest-stop]
    assert cut([A, B, EOS], max_tokens=2).finish.reason is FinishReason.LENGTH
    assert cut([A, EOS, B], max_tokens=3).keep == 2
    assert cut([A, B, EOS], stop=("ab",)).finish.matched_stop == "ab"


def test_stop_string_is_found_anywhere_in_a_run():  # [stop-window]
    run = [A, B, *([C] * 20)]
    assert cut(run, stop=("ab",)).keep == 2


def test_stop_string_may_begin_before_the_run():
    assert cut([B], [D, A], stop=("dab", "x")).finish.matched_stop == "dab"


def test_earlier_start_wins_between_two_complete_stop_strings():
    assert cut([C], [A, B], stop=("bc", "abc")).finish.matched_stop == "abc"


def test_nothing_but_length_stops_below_min_tokens():
    assert cut([EOS], [A], min_tokens=2).finish is None
    assert cut([B], [A], min_tokens=2, stop=("ab",)).finish is None
    assert cut([A], [A], min_tokens=2, max_tokens=2).finish.reason is FinishReason.LENGTH


def test_stop_string_from_before_min_tokens_does_not_count_later():
    assert cut([C], [A, B], min_tokens=2, stop=("ab",)).finish is None
    assert cut([B], [A, B, A], min_tokens=3, stop=("ab",)).finish.matched_stop == "ab"


def test_ids_that_stop_are_suppressed_until_min_tokens():
    sampling = SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=(7,))
    assert [RULE.suppressed(sampling, n) for n in range(4)] == [(EOS, 7, 96), (EOS, 7, 96), (), ()]
    ignoring = SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=(7,), ignore_eos=True)
    assert RULE.suppressed(ignoring, 0) == (7,)


def test_decoded_window_does_not_grow_with_the_output():
    lengths = []

    def measuring(ids: list[int]) -> str:
        lengths.append(len(ids))
        return decode_text(ids)

    rule = StopRule(model=RULE.model, decode_text=measuring)
    sampling = SamplingParams(max_tokens=10_000, stop=("zzzz",))
    rule.cut_at_stop(sampling, prompt_len=1, outputs=[A] * 90, run=[B])
    assert max(lengths) < 10


@given(
    tokens=st.lists(st.integers(0, 30), min_size=1, max_size=30),
    cuts=st.lists(st.integers(1, 5), min_size=30, max_size=30),
    stop=st.lists(st.sampled_from(["ab", "ba", "abc", "dd"]), max_size=2, unique=True),
    min_tokens=st.integers(0, 6),
    max_tokens=st.integers(6, 30),
)
def test_output_end_is_independent_of_run_boundaries(tokens, cuts, stop, min_tokens, max_tokens):  # [stop-window]
    params = {"stop": tuple(stop), "min_tokens": min_tokens, "max_tokens": max_tokens, "stop_token_ids": (29,)}
    assert ending(tokens, [1] * len(tokens), params) == ending(tokens, cuts, params)


def ending(tokens: list[int], cuts: list[int], params: dict[str, object]) -> tuple[list[int], object]:
    outputs: list[int] = []
    for size in cuts:
        run = tokens[len(outputs) : len(outputs) + size]
        if not run:
            break
        end = cut(run, outputs, **params)
        outputs += run[: end.keep]
        if end.finish is not None:
            return outputs, end.finish
    return outputs, None
