"""Edited logits are what is sampled from, and raw ones what is reported. Seeds are fixed: the draws never change."""

import pytest
import torch

from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.sampling.sampler import Sampler
from tandem_testing.edit_builders import make_edits, make_request
from tandem_testing.forward_builders import make_sampling
from tandem_testing.plain_sampling import edited_logits

LOGITS = torch.tensor([2.0, 1.0, 1.0, 0.0, -1.0, -2.0, 0.5, 1.5])
PROMPT, OUTPUTS = (0, 5), (7, 1, 7)
DRAWS = 20_000
CRITICAL = 33.4
"""Of chi-square with 7 degrees of freedom, one less than there are tokens, at p = 0.001 for all 42 cases together."""

EDITS = {
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.25},
    "rewards": {"repetition_penalty": 0.8, "frequency_penalty": -0.4, "presence_penalty": -0.5},
    "bias": {"logit_bias": ((5, 3.0), (0, -2.0))},
    "allowed": {"allowed_token_ids": (1, 3, 5, 6), "logit_bias": ((3, 1.0),)},
    "bad words": {"bad_words": ((0,), (1, 7, 2), (3, 6))},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "logit_bias": ((4, 2.5),),
        "bad_words": ((6,), (7, 1)),
    },
}
FILTERS = {
    "none": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.2},
    "together": {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
}


def distribution(params: SamplingParams) -> torch.Tensor:
    """Probabilities by the definitions, in double precision."""
    edited = edited_logits(LOGITS.tolist(), params, prompt=PROMPT, outputs=OUTPUTS)
    scaled = torch.tensor(edited, dtype=torch.float64) / params.temperature
    if params.top_k:
        scaled[scaled < scaled.sort(descending=True).values[params.top_k - 1]] = -torch.inf
    ranked = scaled.softmax(0).sort(descending=True)
    before = ranked.values.cumsum(0) - ranked.values
    unlikely = ranked.indices[before >= params.top_p]
    scaled[scaled < scaled.max() + torch.tensor(params.min_p, dtype=torch.float64).log()] = -torch.inf
    scaled[unlikely] = -torch.inf
    return scaled.softmax(0)


def draw(params: SamplingParams, count: int = DRAWS) -> torch.Tensor:
    """Token ids at `count` positions, all after the same history."""
    edits = make_edits([make_request(1, params, prompt=PROMPT, outputs=OUTPUTS)])
    sampling = make_sampling(
        temperature=[params.temperature] * count,
        top_k=[params.top_k] * count,
        top_p=[params.top_p] * count,
        min_p=[params.min_p] * count,
        seed=[41] * count,
        position=list(range(count)),
        edits=edits.over_runs(torch.tensor([count])),
    )
    return Sampler().sample(LOGITS.expand(count, -1), sampling).token_ids


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("edits", EDITS.values(), ids=EDITS)
def test_sample_frequencies_match_edited_filtered_distribution(edits, filters):
    params = SamplingParams(max_tokens=9, **edits, **filters)
    expected = distribution(params) * DRAWS
    seen = torch.bincount(draw(params), minlength=len(LOGITS))
    assert not seen[expected == 0].any()
    assert ((seen - expected) ** 2 / expected)[expected > 0].sum() < CRITICAL


def test_greedy_takes_the_largest_edited_logit():
    params = SamplingParams(max_tokens=9, temperature=0.0, bad_words=((0,),), presence_penalty=2.0)
    assert draw(params, 1).tolist() == [2]


def test_logprobs_are_those_of_the_model_before_any_edit():
    params = SamplingParams(max_tokens=9, temperature=0.0, allowed_token_ids=(5,))
    edits = make_edits([make_request(1, params)])
    sampling = make_sampling(temperature=[0.0], all_greedy=True, logprobs=(2,), edits=edits)
    output = Sampler().sample(LOGITS[None], sampling)
    raw = LOGITS.log_softmax(0)
    assert output.token_ids.tolist() == [5]
    assert output.logprobs[0].logprob == pytest.approx(raw[5].item())
    assert [token for token, _ in output.logprobs[0].top] == [0, 7]
    assert output.logprobs[0].top[0][1] == pytest.approx(raw[0].item())


def test_edits_of_next_step_include_this_token():
    sampler = Sampler()
    request = make_request(1, SamplingParams(max_tokens=9, frequency_penalty=2.0), prompt=(1,))
    edits = make_edits([request])
    tokens = []
    for _ in range(4):
        sampling = make_sampling(temperature=[0.0], all_greedy=True, edits=edits)
        chosen = sampler.sample(LOGITS[None], sampling).token_ids
        sampler.record(sampling, chosen)
        tokens += chosen.tolist()
        edits = make_edits([request])
        assert edits.histories == ()
    assert tokens == [0, 7, 1, 2]
