"""TokenSequence: every position once, in order, whatever arrives [position-once]."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.messages.outputs import Finish, FinishReason, TokenLogprob, TokenOutput
from tandem_services.gateway.output.token_sequence import MAX_WAITING_OUTPUTS, Accepted, SequenceGapError, TokenSequence

LENGTH = Finish(reason=FinishReason.LENGTH)


def output(index: int, *ids: int, finish: Finish | None = None) -> TokenOutput:
    logprobs = tuple(TokenLogprob(logprob=-float(i)) for i in ids)
    return TokenOutput(rid="r", index=index, token_ids=ids, logprobs=logprobs, finish=finish)


def accept_all(sequence: TokenSequence, outputs: list[TokenOutput]) -> Accepted:
    accepted = Accepted([], [], None)
    for item in outputs:
        accepted = sequence.accept(item, accepted)
    return accepted


def test_repeated_tokens_are_accepted_once():
    accepted = accept_all(TokenSequence(0), [output(0, 10), output(0, 10), output(1, 11), output(0, 10, 11, 12)])
    assert accepted.token_ids == [10, 11, 12]
    assert [logprob.logprob for logprob in accepted.logprobs] == [-10, -11, -12]


def test_out_of_order_tokens_and_finish_wait_for_the_gap():
    sequence = TokenSequence(0)
    assert accept_all(sequence, [output(1, 11), output(2, 12, finish=LENGTH)]) == Accepted([], [], None)
    assert sequence.has_gap
    accepted = accept_all(sequence, [output(0, 10)])
    assert (accepted.token_ids, accepted.finish) == ([10, 11, 12], LENGTH)


def test_resumed_sequence_starts_where_the_last_attempt_ended():
    assert accept_all(TokenSequence(5), [output(3, 13, 14), output(5, 15)]).token_ids == [15]


def test_finish_without_tokens_counts_at_its_place_only():
    assert accept_all(TokenSequence(2), [output(1, finish=LENGTH)]).finish is None
    assert accept_all(TokenSequence(2), [output(2, finish=LENGTH)]).finish is LENGTH


def test_lost_output_is_noticed_before_memory_is():
    sequence = TokenSequence(0)
    with pytest.raises(SequenceGapError):
        accept_all(sequence, [output(i, i) for i in range(1, MAX_WAITING_OUTPUTS + 2)])


@given(data=st.data(), length=st.integers(1, 12))
def test_any_order_and_any_repetition_give_the_same_sequence(data, length):
    starts = data.draw(st.lists(st.integers(0, length - 1), max_size=12))
    ends = [data.draw(st.integers(start + 1, length)) for start in starts]
    needed = [(i, i + 1) for i in range(length)]
    spans = data.draw(st.permutations([*needed, *zip(starts, ends, strict=True)]))
    outputs = [output(start, *range(start, end), finish=LENGTH if end == length else None) for start, end in spans]
    accepted = accept_all(TokenSequence(0), outputs)
    assert accepted.token_ids == list(range(length))
    assert len(accepted.logprobs) == length
    assert accepted.finish is LENGTH


SCORES = (None, TokenLogprob(logprob=-1.0))


def scored(index: int, *ids: int) -> TokenOutput:
    return TokenOutput(rid="r", index=index, token_ids=ids, prompt_logprobs=SCORES)


def test_tokens_wait_for_the_prompts_logprobs():
    sequence = TokenSequence(0, awaits_prompt=True)
    assert accept_all(sequence, [output(0, 10), output(1, 11)]).token_ids == []
    assert sequence.has_gap
    accepted = accept_all(sequence, [scored(0, 10)])
    assert (accepted.token_ids, accepted.prompt_logprobs) == ([10, 11], SCORES)
    assert not sequence.has_gap
    assert accept_all(sequence, [output(2, 12)]).prompt_logprobs is None


def test_unexpected_prompt_logprobs_are_dropped():
    assert accept_all(TokenSequence(0), [scored(0, 10)]).prompt_logprobs is None


@given(data=st.data(), length=st.integers(1, 8))
def test_prompt_logprobs_come_with_first_tokens_in_any_order(data, length):
    others = [output(i, i, finish=LENGTH if i == length - 1 else None) for i in range(length)]
    sequence, accepted = TokenSequence(0, awaits_prompt=True), Accepted([], [], None)
    first: Accepted | None = None
    for item in data.draw(st.permutations([*others, scored(0, 0)])):
        accepted = sequence.accept(item, accepted)
        if accepted.token_ids and first is None:
            first = accepted
    assert first is not None
    assert first.prompt_logprobs == SCORES
    assert accepted.token_ids == list(range(length))
