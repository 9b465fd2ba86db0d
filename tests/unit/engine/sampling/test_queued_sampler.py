"""What is queued on a device samples the tokens, and gives the logprobs, that the host's sampler does."""

from dataclasses import replace

import pytest
import torch

from tandem_engine.forward.batch import PromptPositions, TokenMasks
from tandem_engine.sampling.device_sampler import QueuedSampler, queue_prompt_scores
from tandem_engine.sampling.device_sampler import most_likely as queued_most_likely
from tandem_engine.sampling.logprobs import most_likely, prompt_scores
from tandem_engine.sampling.sampler import Sampler
from tandem_testing.edit_builders import make_edits, make_request
from tandem_testing.queued_sampling import PARAMS, ROWS, VOCAB, both, random_logits, random_sampling


@pytest.mark.parametrize("seed", range(12))
def test_same_tokens_and_logprobs(seed):
    both(random_logits(seed), random_sampling(seed, logprobs=(0, 3, -1, 20, 1, VOCAB)), Sampler(), QueuedSampler())


def test_same_edits_step_after_step():
    requests = [make_request(row + 1, params, prompt=[1, 2, 3], outputs=[3, 9]) for row, params in enumerate(PARAMS)]
    edits = make_edits(requests)
    host, queued = Sampler(), QueuedSampler()
    suppress = ((), (4, 5), (), (), (), (1,))
    for seed in range(1, 8):
        both(random_logits(seed), random_sampling(seed, edits=edits, suppress=suppress), host, queued)
        edits = make_edits([]) if seed == 7 else _without_histories(edits)
    assert queued.editor.penalties._counts[0].sum() == host.editor.penalties._counts[0].sum()


def _without_histories(edits):
    return replace(edits, histories=())


@pytest.mark.parametrize("words", [9, 10, 12])
@pytest.mark.parametrize("rows", [(1, 4), (*range(ROWS),)])
def test_same_under_masks(words, rows):
    masks = TokenMasks.open(rows, words)
    masks.bitmask.copy_(torch.randint(-(2**31), 2**31, masks.bitmask.shape, generator=torch.Generator().manual_seed(1)))
    masks.release()
    both(random_logits(1), random_sampling(1, masks=masks), Sampler(), QueuedSampler())


@pytest.mark.parametrize("count", [0, 1, 7, 40])
def test_ties_are_ordered_by_lowest_id(count):
    logprobs = torch.randn(4, 40, generator=torch.Generator().manual_seed(2)).mul(2).round()
    logprobs[0] = 0.0
    logprobs[1, ::2] = -0.0
    logprobs[2, 3:30] = -torch.inf
    values, ids = queued_most_likely(logprobs, count)
    for row in range(4):
        found = tuple(zip(ids[row].tolist(), values[row].tolist(), strict=True))
        assert found == most_likely(logprobs[row], count)


def test_same_scores_of_prompts():
    hidden = torch.randn(300, 8, generator=torch.Generator().manual_seed(3))
    head = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(4))
    wanted = [
        PromptPositions(sequence=0, first=1, tokens=torch.arange(280), token_ids=torch.arange(280), top=2),
        PromptPositions(sequence=2, first=5, tokens=torch.arange(20), token_ids=torch.arange(20), top=0),
    ]
    outcome = queue_prompt_scores(hidden, wanted, lambda rows: rows @ head)
    assert outcome.read(outcome.tensors) == prompt_scores(hidden, wanted, lambda rows: rows @ head)
