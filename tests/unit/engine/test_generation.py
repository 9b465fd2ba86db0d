"""Outputs of one request, gathered from one worker or two."""

import pytest

from tandem_engine.engine.stats import Generation, Generations
from tandem_engine.messages.outputs import Finish, FinishReason, TokenLogprob, TokenOutput

END = Finish(reason=FinishReason.LENGTH)


def test_positions_are_accepted_once_from_any_worker() -> None:
    generation = Generation(rid="r", resumed=0)
    generation.take(TokenOutput(rid="r", index=0, token_ids=(5,), cached_tokens=16))
    generation.take(TokenOutput(rid="r", index=0, token_ids=(5, 6), cached_tokens=0))
    generation.take(TokenOutput(rid="r", index=2, token_ids=(7,), finish=END))
    assert generation.token_ids == (5, 6, 7)
    assert generation.cached_tokens == 16
    assert generation.finish == END


def test_resumed_tokens_are_not_part_of_the_output() -> None:
    generation = Generation(rid="r", resumed=3)
    generation.take(TokenOutput(rid="r", index=3, token_ids=(8,), logprobs=(TokenLogprob(logprob=-1.0),)))
    assert generation.token_ids == (8,)
    assert len(generation.logprobs) == 1


def test_gap_in_tokens_is_an_error_with_its_position() -> None:
    with pytest.raises(AssertionError, match="output 2 came before 0"):
        Generation(rid="r", resumed=0).take(TokenOutput(rid="r", index=2, token_ids=(1,)))


def test_outputs_for_unknown_requests_are_ignored() -> None:
    generations = Generations()
    generations.expect("a")
    generations(b"", (TokenOutput(rid="b", index=0, token_ids=(1,)), TokenOutput(rid="a", index=0, finish=END)))
    assert generations.take_all(["a"])[0].finish == END
    assert generations.by_rid == {}
