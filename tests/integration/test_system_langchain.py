"""A session with LangChain's own client on the bundled model: chats, streams, tools, schemas, vectors, errors."""

import math
from typing import Literal

import httpx
import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

from tandem_testing.client_sessions import QUESTION, WEATHER, check_forecast

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("system")]


class Forecast(BaseModel):
    """The weather to come."""

    city: Literal["Bern", "Genf"]
    days: int = Field(ge=1, le=9)


@pytest.fixture
async def settings(fleet):
    # Without connections of its own a client takes those of an event loop before, which has ended.
    async with httpx.AsyncClient(timeout=60) as connections:
        with httpx.Client(timeout=60) as others:
            yield {
                "base_url": f"{fleet.system.url}/v1",
                "api_key": "none",
                "model": fleet.model,
                "max_retries": 0,
                "http_async_client": connections,
                "http_client": others,
            }


@pytest.fixture
def chat(settings) -> ChatOpenAI:
    return ChatOpenAI(**settings, temperature=0, max_tokens=200)


async def test_chat_is_answered_whole_streamed_and_in_batches(chat, fleet):
    short = chat.model_copy(update={"max_tokens": 12})
    messages = [SystemMessage("Be brief."), HumanMessage("Hello")]
    whole = await short.ainvoke(messages)
    assert whole.usage_metadata["output_tokens"] <= 12
    assert whole.response_metadata["model_name"] == fleet.model
    assert whole.response_metadata["finish_reason"] in ("stop", "length")
    streamed = AIMessageChunk("")
    async for chunk in short.astream(messages, stream_usage=True):
        streamed += chunk
    assert streamed.content == whole.content
    assert streamed.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]
    assert [answer.content for answer in await short.abatch([messages, messages])] == [whole.content] * 2


async def test_logprobs_reach_the_message(chat):
    answer = await chat.bind(logprobs=True, top_logprobs=2, max_tokens=3).ainvoke(QUESTION)
    assert [len(token["top_logprobs"]) for token in answer.response_metadata["logprobs"]["content"]] == [2, 2, 2]


@pytest.mark.parametrize("choice", ["any", "weather"])
@pytest.mark.parametrize("strict", [None, True])
async def test_bound_tool_is_called_and_its_answer_taken(chat, choice, strict):
    bound = chat.bind_tools([WEATHER], tool_choice=choice, strict=strict, parallel_tool_calls=False)
    asked = await bound.ainvoke(QUESTION)
    [call] = asked.tool_calls
    assert (call["name"], asked.content) == ("weather", "")
    check_forecast(call["args"])
    streamed = AIMessageChunk("")
    async for chunk in bound.astream(QUESTION):
        streamed += chunk
    assert [each["args"] for each in streamed.tool_calls] == [call["args"]]
    result = ToolMessage("rain", tool_call_id=call["id"])
    ended = await chat.bind_tools([WEATHER], tool_choice="none").bind(max_tokens=4).ainvoke([QUESTION, asked, result])
    assert ended.usage_metadata["output_tokens"] <= 4


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_structured_output_is_an_object_of_the_class(chat, method):
    forecast = await chat.with_structured_output(Forecast, method=method).ainvoke(QUESTION)
    assert isinstance(forecast, Forecast)


async def test_response_has_requested_structured_output(settings):
    chat = ChatOpenAI(**settings, temperature=0, max_tokens=200, use_responses_api=True)
    assert isinstance(await chat.with_structured_output(Forecast).ainvoke(QUESTION), Forecast)


async def test_langchain_responses_stream_and_call_required_tools(settings):
    chat = ChatOpenAI(**settings, temperature=0, max_tokens=200, use_responses_api=True)
    whole = await chat.bind(max_tokens=8).ainvoke(QUESTION)
    streamed = AIMessageChunk("")
    async for chunk in chat.bind(max_tokens=8).astream(QUESTION):
        streamed += chunk
    assert streamed.text == whole.text
    assert streamed.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]
    [call] = (await chat.bind_tools([WEATHER], tool_choice="weather").ainvoke(QUESTION)).tool_calls
    check_forecast(call["args"])


async def test_prompts_are_completed(settings):
    model = OpenAI(**settings, temperature=0, max_tokens=8)
    whole = await model.agenerate(["One, two,", "Red, green,"])
    assert len(whole.generations) == 2
    assert whole.llm_output["token_usage"]["completion_tokens"] <= 16
    streamed = [piece async for piece in model.astream("One, two,")]
    assert "".join(streamed) == whole.generations[0][0].text


async def test_langchain_embeddings_are_repeatable_unit_vectors(settings):
    # Without a tokenizer of OpenAI's, which has nothing to do with the model and would be fetched from elsewhere.
    embeddings = OpenAIEmbeddings(**settings, check_embedding_ctx_length=False)
    one, other, again = await embeddings.aembed_documents(["rain", "sun", "rain"])
    assert one == again != other
    assert math.isclose(math.hypot(*one), 1, rel_tol=1e-4)
    assert await embeddings.aembed_query("rain") == pytest.approx(one, abs=1e-4)


async def test_synchronous_client_gives_equal_output(chat):
    short = chat.model_copy(update={"max_tokens": 8})
    whole = short.invoke("Hello").content
    assert "".join(chunk.content for chunk in short.stream("Hello")) == whole


async def test_errors_are_those_that_callers_look_for(chat, settings):
    with pytest.raises(ContextOverflowError):
        await chat.ainvoke("long " * 5000)
    with pytest.raises(openai.BadRequestError) as refused:
        await chat.bind(temperature=3).ainvoke("Hello")
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await ChatOpenAI(**{**settings, "model": "other"}).ainvoke("Hello")
