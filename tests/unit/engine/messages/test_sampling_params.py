"""Sampling parameters name the field and the limit when they are out of range."""

import math

import msgspec
import pytest

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.messages.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_PROMPT_LOGPROBS,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
    ReasoningBudget,
    SamplingParams,
)

VOCAB = 100
BUDGET = ReasoningBudget(tokens=3, begin=(4,), end=(6, 7))
GOOD = SamplingParams(max_tokens=8, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, stop=("a",), stop_token_ids=(99,))


def test_parameters_within_their_limits_pass() -> None:
    GOOD.check(vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("min_tokens", -1),
        ("min_tokens", 9),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", 1.5),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("logprobs", -1),
        ("logprobs", MAX_TOP_LOGPROBS + 1),
        ("stop", ("",)),
        ("stop", ("x" * (MAX_STOP_BYTES + 1),)),
        ("stop", tuple("x" * (i + 1) for i in range(MAX_STOP_STRINGS + 1))),
        ("stop_token_ids", (VOCAB,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", tuple(range(65))),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", MAX_TOP_LOGPROBS + 1),
        ("logprob_start", -1),
        ("logprob_start", 1),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.inf),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 2.1),
        ("repetition_penalty", math.nan),
        ("logit_bias", ((VOCAB, 1.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, 100.5),)),
        ("logit_bias", ((1, math.nan),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", tuple((1, 1.0) for _ in range(MAX_LOGIT_BIASES + 1))),
        ("allowed_token_ids", (VOCAB,)),
        ("allowed_token_ids", (1,) * (MAX_ALLOWED_TOKEN_IDS + 1)),
        ("bad_words", ((),)),
        ("bad_words", ((1, VOCAB),)),
        ("bad_words", ((1,) * (MAX_BAD_WORD_TOKENS + 1),)),
        ("bad_words", ((1,),) * (MAX_BAD_WORDS + 1)),
    ],
)
def test_parameter_out_of_range_is_refused_by_name(field, value) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        msgspec.structs.replace(GOOD, **{field: value}).check(vocab_size=VOCAB)
    assert refused.value.param == field
    assert field.split("_")[0] in str(refused.value)


@pytest.mark.parametrize(
    ("temperature", "top_k", "greedy"), [(0.0, 0, True), (1e-12, 0, True), (1.0, 1, True), (0.5, 0, False)]
)
def test_greedy_is_a_vanishing_temperature_or_a_single_candidate(temperature, top_k, greedy) -> None:
    assert SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k).greedy is greedy


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": ((2, 1.0),), "allowed_token_ids": (1,)},
        {"bad_words": ((1,), (2,), (3, 4)), "allowed_token_ids": (1, 2)},
        {"logit_bias": ((1, -100.0), (2, -100.0)), "allowed_token_ids": (1, 2)},
    ],
)
def test_rules_that_contradict_allowed_tokens_are_rejected(fields) -> None:  # [logit-bias]
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(max_tokens=1, **fields).check(vocab_size=VOCAB)
    assert refused.value.param == "allowed_token_ids"


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("allowed_token_ids", {"allowed_token_ids": (5, 6)}),
        ("bad_words", {"bad_words": ((1, 2), (3, 6))}),
        ("stop_token_ids", {"stop_token_ids": (6,), "min_tokens": 1}),
    ],
)
def test_nothing_may_forbid_the_end_of_the_reasoning(field, fields) -> None:
    sampling = SamplingParams(max_tokens=9, **fields)
    sampling.check(vocab_size=VOCAB)
    with pytest.raises(InvalidRequestError) as refused:
        msgspec.structs.replace(sampling, reasoning_budget=BUDGET).check(vocab_size=VOCAB)
    assert refused.value.param == field


@pytest.mark.parametrize(
    "fields",
    [
        *({"tokens": -1}, {"tokens": 2**31}, {"begin": ()}, {"end": ()}, {"end": (1,) * 17}, {"begin": (VOCAB,)}),
        *({"ended_by": (-1,)}, {"ended_by": (VOCAB,)}, {"ended_by": (1,) * 17}),
    ],
)
def test_budget_out_of_range_is_refused_by_name(fields) -> None:
    bad = msgspec.structs.replace(BUDGET, **fields)
    with pytest.raises(InvalidRequestError, match="thinking_token_budget") as refused:
        SamplingParams(max_tokens=9, reasoning_budget=bad).check(vocab_size=VOCAB)
    assert refused.value.param == "thinking_token_budget"


def test_rules_that_leave_something_allowed_pass() -> None:
    SamplingParams(
        max_tokens=1,
        logit_bias=((1, 1.0), (5, -1.0)),
        allowed_token_ids=(1, 2),
        bad_words=((1,), (2, 2)),
    ).check(vocab_size=VOCAB)


def test_prompt_logprobs_fit_the_prompt_and_the_message() -> None:  # [logprobs-bounded]
    wanted = SamplingParams(max_tokens=1, prompt_logprobs=1)
    wanted.check_prompt(MAX_PROMPT_LOGPROBS // 2)
    with pytest.raises(InvalidRequestError, match="the limit is"):
        wanted.check_prompt(MAX_PROMPT_LOGPROBS // 2 + 1)
    with pytest.raises(InvalidRequestError, match="below the prompt's 5 tokens"):
        msgspec.structs.replace(wanted, logprob_start=5).check_prompt(5)


def test_sampling_params_report_sampler_features() -> None:
    plain = SamplingParams(max_tokens=1, min_tokens=1, stop_token_ids=(4,), logprobs=1, prompt_logprobs=0)
    assert (plain.penalized, plain.recalls_tokens, plain.edits_logits) == (False, False, False)
    words = SamplingParams(max_tokens=1, bad_words=((1,),))
    assert (words.edits_logits, words.recalls_tokens) == (True, False)
    assert SamplingParams(max_tokens=1, bad_words=((1, 2),)).recalls_tokens
    for penalty in ({"presence_penalty": -0.1}, {"frequency_penalty": 0.1}, {"repetition_penalty": 0.9}):
        assert SamplingParams(max_tokens=1, **penalty).penalized
