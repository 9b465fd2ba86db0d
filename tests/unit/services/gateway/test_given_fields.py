"""Fields of a request that are left out cost nothing, and mean the same as their neutral values."""

from typing import Any

import pytest

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.messages.sampling import SamplingParams
from tandem_services.gateway.api.chat import template_messages
from tandem_services.gateway.api.openai_schemas import ChatMessage, ChatRequest
from tandem_services.gateway.api.request_fields import choice_counts, sampling_params

NEUTRAL: dict[str, Any] = {
    "min_tokens": 0,
    "top_k": -1,
    "min_p": 0.0,
    "stop_token_ids": [],
    "stop": [],
    "logprob_start": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
}


def sampling_of(**fields: Any) -> SamplingParams:
    return sampling_params(
        ChatRequest(messages=[], seed=7, **fields),
        max_tokens=5,
        logprobs=None,
        bad_words=(),
        vocab_size=100,
        grammar=None,
    )


@pytest.mark.parametrize("name", NEUTRAL)
def test_omitted_field_means_its_neutral_value(name):
    plain = sampling_of(temperature=0.5, top_p=0.9, ignore_eos=True)
    assert sampling_of(temperature=0.5, top_p=0.9, ignore_eos=True, **{name: NEUTRAL[name]}) == plain


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_tokens": 6}, "min_tokens"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"),
    ],
    ids=str,
)
def test_field_out_of_range_is_named(fields, param):
    with pytest.raises(InvalidRequestError) as refused:
        sampling_params(
            ChatRequest(messages=[], **fields), max_tokens=5, logprobs=None, bad_words=(), vocab_size=9, grammar=None
        )
    assert refused.value.param == param


def test_missing_n_means_one_choice():
    assert choice_counts(ChatRequest(messages=[]), prompts=1) == choice_counts(ChatRequest(messages=[], n=1), prompts=1)


@pytest.mark.parametrize("name", ["", "ada"])
def test_name_of_a_message_reaches_the_chat_template(name):
    [entry] = template_messages([ChatMessage(role="user", content="hi", name=name)])
    assert entry == {"role": "user", "content": "hi", "name": name}
    assert template_messages([ChatMessage(role="user", content="hi")]) == [{"role": "user", "content": "hi"}]
