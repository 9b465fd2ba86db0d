"""Sampling parameters name the field and the limit when they are out of range."""

import math

import msgspec
import pytest

from tandem_engine.errors import InvalidRequestError
from tandem_engine.messages.sampling import MAX_STOP_BYTES, MAX_STOP_STRINGS, MAX_TOP_LOGPROBS, SamplingParams

VOCAB = 100
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
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(field, value) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        msgspec.structs.replace(GOOD, **{field: value}).check(vocab_size=VOCAB)
    assert refused.value.param == field
    assert field.split("_")[0] in str(refused.value)


@pytest.mark.parametrize(
    ("temperature", "top_k", "greedy"), [(0.0, 0, True), (1e-12, 0, True), (1.0, 1, True), (0.5, 0, False)]
)
def test_greedy_is_a_vanishing_temperature_or_a_single_candidate(temperature, top_k, greedy) -> None:
    assert SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k).greedy is greedy
