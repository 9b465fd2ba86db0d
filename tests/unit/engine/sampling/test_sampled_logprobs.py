import pytest
import torch

from tandem_engine.forward.batch import SampledLogprobs
from tandem_engine.sampling.device_sampler import queue_sampled
from tandem_engine.sampling.logprobs import sampled_logprobs
from tandem_engine.sampling.sampler import Sampler
from tandem_testing.forward_builders import make_sampling

LOGITS = torch.tensor([[1.0, 3.0, 2.0, 3.0, -1.0]])
LOGPROBS = LOGITS.log_softmax(1)[0].tolist()


def top(count: int) -> tuple[tuple[int, float], ...]:
    result = sampled_logprobs(LOGITS, torch.tensor([4]), (count,))[0]
    assert result is not None
    assert result.logprob == pytest.approx(LOGPROBS[4])
    return result.top


def test_zero_logprobs_return_sampled_token_only():
    assert top(0) == ()


def test_top_logprobs_are_sorted_and_ties_by_id():
    assert [token for token, _ in top(1)] == [1]
    assert [token for token, _ in top(3)] == [1, 3, 2]
    assert [value for _, value in top(3)] == pytest.approx([LOGPROBS[1], LOGPROBS[3], LOGPROBS[2]])


def test_logprobs_above_vocabulary_size_return_all():
    assert [token for token, _ in top(20)] == [1, 3, 2, 0, 4]


def test_rows_without_logprobs_get_none():
    logits = LOGITS.expand(3, -1)
    result = sampled_logprobs(logits, torch.tensor([1, 1, 1]), (-1, 0, -1))
    assert result == (None, SampledLogprobs(logprob=pytest.approx(LOGPROBS[1]), top=()), None)


def test_logprobs_are_those_of_the_model_not_of_the_filters():
    sampling = make_sampling(temperature=[0.5], top_k=[1], suppress=((1,),), logprobs=(2,))
    sampled = Sampler().sample(LOGITS, sampling)
    assert sampled.token_ids.tolist() == [3]
    assert sampled.logprobs[0].logprob == pytest.approx(LOGPROBS[3])
    assert [token for token, _ in sampled.logprobs[0].top] == [1, 3]


@pytest.mark.parametrize("queued", [False, True])
def test_requested_logprob_ids_replace_top_logprobs_in_order(queued):
    logits, token_ids = LOGITS.expand(4, -1), torch.tensor([1, 1, 1, 4])
    wanted, named = (2, 0, -1, 1), torch.tensor([[4, 0, 4], [3, -1, -1], [-1, -1, -1], [-1, -1, -1]])
    if queued:
        outcome = queue_sampled(logits, token_ids, wanted, named)
        result = outcome.read(outcome.tensors)
    else:
        result = sampled_logprobs(logits, token_ids, wanted, named)
    assert result[2] is None
    found = [[] if row is None else [token for token, _ in row.top] for row in result]
    assert found == [[4, 0, 4], [3], [], [1]]
    for row in result:
        for token, value in () if row is None else row.top:
            assert value == pytest.approx(LOGPROBS[token])


def test_sampler_returns_no_logprobs_by_default():
    assert Sampler().sample(LOGITS, make_sampling(temperature=[1.0])).logprobs == ()
