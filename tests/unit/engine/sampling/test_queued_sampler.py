"""What is queued on a device samples the tokens, and gives the logprobs, that the host's sampler does."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem_engine.forward.forward_batch import PromptPositions, SamplingBatch
from tandem_engine.forward.step_inputs import step_inputs
from tandem_engine.forward.token_masks import TokenMasks
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.sampling.logprobs import most_likely
from tandem_engine.sampling.prompt_logprobs import prompt_scores
from tandem_engine.sampling.queued_logprobs import most_likely as queued_most_likely
from tandem_engine.sampling.queued_logprobs import queue_prompt_scores
from tandem_engine.sampling.queued_sampler import QueuedSampler
from tandem_engine.sampling.sampler import Sampler
from tandem_testing.edit_builders import make_edits, make_request
from tandem_testing.forward_builders import Seq, make_batch, make_sampling

VOCAB = 300
ROWS = 6
PARAMS = [
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=9, presence_penalty=1.5, frequency_penalty=0.25, repetition_penalty=1.3),
    SamplingParams(max_tokens=9, bad_words=((3, 5), (7,), (9, 8, 2)), logit_bias=((4, 3.0), (9, -20.0))),
    SamplingParams(max_tokens=9, allowed_token_ids=(3, 7, 11), bad_words=((7,),)),
    SamplingParams(max_tokens=9, allowed_token_ids=(7,), bad_words=((7,),)),
    SamplingParams(max_tokens=9, repetition_penalty=0.5),
]


def random_logits(seed: int) -> torch.Tensor:
    """With many equal values, and a row that means nothing."""
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)).mul(8).round().div(4)
    if seed % 3 == 0:
        logits[seed % ROWS, 17] = torch.nan
    return logits


def random_sampling(seed: int, **more: object) -> SamplingBatch:
    random = np.random.default_rng(seed)
    pick = lambda values: [values[i] for i in random.integers(0, len(values), ROWS)]  # noqa: E731
    return make_sampling(
        temperature=pick([0.0, 0.7, 1.0, 2.5]),
        top_k=pick([0, 1, 5, 40, VOCAB + 3]),
        top_p=pick([1.0, 0.9, 0.3]),
        min_p=pick([0.0, 0.02]),
        seed=[*range(ROWS)],
        position=pick([1, 2, 3]),
        **more,
    )


def both(logits: torch.Tensor, sampling: SamplingBatch, host: Sampler, queued: QueuedSampler) -> None:
    """Sample, compare, and record."""
    batch = make_batch(
        [Seq(seq_len=2, decode=True, pages=[1], row=row) for row in range(1, ROWS + 1)], sampling=sampling
    )
    expected = host.sample(logits.clone(), sampling)
    inputs = step_inputs(batch)
    masks = None if sampling.masks is None else (torch.tensor(sampling.masks.rows), sampling.masks.wait())
    found = queued.sample(logits, inputs, masks)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    sound_rows = (expected.token_ids >= 0).tolist()  # of the others nobody asks
    pairs = zip(
        found.logprobs.read(found.logprobs.tensors), expected.logprobs, sound_rows, strict=bool(expected.logprobs)
    )
    assert all(mine == theirs for mine, theirs, is_sound in pairs if is_sound)
    sound = expected.token_ids.clamp(min=0)
    host.record(sampling, sound)
    queued.record(inputs, sound[:, None])


@pytest.mark.parametrize("seed", range(12))
def test_the_same_tokens_and_logprobs(seed):
    both(random_logits(seed), random_sampling(seed, logprobs=(0, 3, -1, 20, 1, VOCAB)), Sampler(), QueuedSampler())


def test_the_same_edits_step_after_step():
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
def test_the_same_under_masks(words, rows):
    masks = TokenMasks.open(rows, words)
    masks.bitmask.copy_(torch.randint(-(2**31), 2**31, masks.bitmask.shape, generator=torch.Generator().manual_seed(1)))
    masks.release()
    both(random_logits(1), random_sampling(1, masks=masks), Sampler(), QueuedSampler())


@pytest.mark.parametrize("count", [0, 1, 7, 40])
def test_among_equals_the_lowest_ids_come_first(count):
    logprobs = torch.randn(4, 40, generator=torch.Generator().manual_seed(2)).mul(2).round()
    logprobs[0] = 0.0
    logprobs[1, ::2] = -0.0
    logprobs[2, 3:30] = -torch.inf
    values, ids = queued_most_likely(logprobs, count)
    for row in range(4):
        found = tuple(zip(ids[row].tolist(), values[row].tolist(), strict=True))
        assert found == most_likely(logprobs[row], count)


def test_the_same_scores_of_prompts():
    hidden = torch.randn(300, 8, generator=torch.Generator().manual_seed(3))
    head = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(4))
    wanted = [
        PromptPositions(sequence=0, first=1, tokens=torch.arange(280), token_ids=torch.arange(280), top=2),
        PromptPositions(sequence=2, first=5, tokens=torch.arange(20), token_ids=torch.arange(20), top=0),
    ]
    outcome = queue_prompt_scores(hidden, wanted, lambda rows: rows @ head)
    assert outcome.read(outcome.tensors) == prompt_scores(hidden, wanted, lambda rows: rows @ head)
