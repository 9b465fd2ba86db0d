"""A session with LiteLLM on the bundled model, as one of OpenAI's kind and as one of vLLM's.

LiteLLM wants an older client of OpenAI's than the other tests have, so it is no development dependency: `make clients`
runs this file in an environment of its own (docs/api.md).
"""

import json
import os

import pytest

# Its list of prices is fetched from elsewhere unless this is set.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
litellm = pytest.importorskip("litellm", reason="LiteLLM is not installed: run `make clients`")

from tandem_testing.client_sessions import PARAMETERS, QUESTION, WEATHER, check_forecast  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("system"),
    # Its sessions and its models of answers are its own to mend.
    pytest.mark.filterwarnings("ignore"),
]
ASK = [{"role": "user", "content": QUESTION}]
FORM = {"type": "json_schema", "json_schema": {"name": "forecast", "strict": True, "schema": PARAMETERS}}
PROVIDERS = ("openai", "hosted_vllm")


@pytest.fixture(params=PROVIDERS)
def common(request, fleet):
    return {
        "model": f"{request.param}/{fleet.model}",
        "api_base": f"{fleet.system.url}/v1",
        "api_key": "none",
        "num_retries": 0,
    }


async def streamed(**fields):
    chunks = [chunk async for chunk in await litellm.acompletion(**fields, stream=True)]
    return litellm.stream_chunk_builder(chunks, messages=fields["messages"])


async def test_chat_is_answered_whole_and_streamed(common):
    fields = {**common, "messages": ASK, "temperature": 0, "max_tokens": 12}
    whole = await litellm.acompletion(**fields)
    parts = await streamed(**fields, stream_options={"include_usage": True})
    assert whole.usage.completion_tokens <= 12
    assert parts.choices[0].message.content == whole.choices[0].message.content
    assert parts.usage.total_tokens == whole.usage.total_tokens
    assert parts.choices[0].finish_reason == whole.choices[0].finish_reason


async def test_synchronous_client_gives_equal_output(common):
    fields = {**common, "messages": ASK, "temperature": 0, "max_tokens": 8}
    whole = litellm.completion(**fields).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**fields, stream=True)]
    assert "".join(parts) == whole


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_tool_is_called_and_its_answer_taken(common, choice):
    fields = {**common, "messages": ASK, "temperature": 0, "max_tokens": 200, "tools": [WEATHER]}
    must = {"tool_choice": choice, "parallel_tool_calls": False}
    message = (await litellm.acompletion(**fields, **must)).choices[0].message
    [call] = message.tool_calls
    arguments = json.loads(call.function.arguments)
    # For vLLM LiteLLM takes `additionalProperties` out of a tool's schema: there may be more than these.
    check_forecast({name: arguments[name] for name in PARAMETERS["required"]})
    [again] = (await streamed(**fields, **must)).choices[0].message.tool_calls
    assert again.function.arguments == call.function.arguments
    reported = [
        *ASK,
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    ended = await litellm.acompletion(**{**fields, "messages": reported, "tool_choice": "none", "max_tokens": 4})
    assert ended.usage.completion_tokens <= 4


async def test_litellm_response_format_is_followed(common):
    fields = {**common, "messages": ASK, "temperature": 0, "max_tokens": 200, "response_format": FORM}
    for answer in (await litellm.acompletion(**fields), await streamed(**fields)):
        check_forecast(json.loads(answer.choices[0].message.content))


async def test_prompts_are_completed(common, fleet):
    fields = {**common, "model": f"text-completion-openai/{fleet.model}", "prompt": "One, two,", "max_tokens": 8}
    whole = await litellm.atext_completion(**fields, temperature=0)
    stream = await litellm.atext_completion(**fields, temperature=0, stream=True)
    assert "".join([chunk.choices[0].text or "" async for chunk in stream]) == whole.choices[0].text


async def test_litellm_embeddings_are_repeatable_and_counted(common):
    answer = await litellm.aembedding(**common, input=["rain", "sun", "rain"], encoding_format="float")
    one, other, again = [item["embedding"] for item in answer.data]
    assert one == again != other
    assert answer.usage.prompt_tokens > 0


async def test_response_is_answered(common):
    response = await litellm.aresponses(**common, input=QUESTION, max_output_tokens=16)
    assert response.usage.output_tokens <= 16
    assert response.status in ("completed", "incomplete")


async def test_errors_are_those_that_callers_look_for(common):
    fields = {**common, "messages": ASK, "max_tokens": 4}
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        await litellm.acompletion(**fields, temperature=3)
    with pytest.raises(litellm.NotFoundError):
        await litellm.acompletion(**{**fields, "model": fields["model"] + "-other"})
    with pytest.raises(litellm.ContextWindowExceededError):
        await litellm.acompletion(**{**fields, "messages": [{"role": "user", "content": "long " * 5000}]})
