"""Answers and every event of streams are of the official clients' own types, checked strictly.

The clients themselves build their objects without looking at what is missing: an accumulator that copes today may not
tomorrow, and other programs that use these types do look.
"""

import json
from functools import cache
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_testing.gateway_builders import live_gateway, script
from tandem_testing.mock_engine import MockBehavior, scripted_tokens
from tandem_testing.tokenizer_builders import EOS, THINKING_CHATML, write_tokenizer

TEXT = '<think>\nRain?\n</think>\nHm.\n<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {}}
MESSAGES = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "weather", "parameters": PARAMETERS}
CHAT = {"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]}
RESPONSE = {"input": "hi", "tools": [{"type": "function", **FUNCTION}]}
MESSAGE = {"messages": MESSAGES, "tools": [{"name": "weather", "input_schema": PARAMETERS}], "max_tokens": 400}


@cache
def reader(kind: Any) -> TypeAdapter[Any]:
    """Some take a second to build."""
    return TypeAdapter(kind)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> TextTokenizer:
    return TextTokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), chat_template=THINKING_CHATML))


@pytest.fixture
def serving(rack, tokenizer):
    """A gateway in front of an engine that thinks, says something and calls a tool; it may die on the way."""

    def start(**behavior: Any):
        ids = script(tokenizer, TEXT, eos=EOS)
        rack.add("solo", MockBehavior(token=scripted_tokens(ids), eos=EOS, **behavior)).context_length = 4096
        return live_gateway(rack.context, tokenizer, rack.engines, recovery_s=0.1)

    return start


def documents(text: str) -> list[Any]:
    lines = (line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


WHOLE = {
    "chat": ("/v1/chat/completions", ChatCompletion, CHAT),
    "chat that was cut": ("/v1/chat/completions", ChatCompletion, {**CHAT, "max_tokens": 4}),
    "chat with logprobs": ("/v1/chat/completions", ChatCompletion, {"messages": MESSAGES, "logprobs": True}),
    "completion": ("/v1/completions", Completion, {"prompt": "hi", "logprobs": 2, "n": 2}),
    "response": ("/v1/responses", Response, RESPONSE),
    "response that was cut": ("/v1/responses", Response, {**RESPONSE, "max_output_tokens": 4}),
    "message": ("/v1/messages", Message, MESSAGE),
    "message that was cut": ("/v1/messages", Message, {**MESSAGE, "max_tokens": 4}),
    "embeddings": ("/v1/embeddings", CreateEmbeddingResponse, {"input": "hi"}),
}


@pytest.mark.parametrize(("path", "kind", "fields"), WHOLE.values(), ids=WHOLE.keys())
async def test_answer_is_of_the_clients_type(serving, path, kind, fields):
    async with serving() as gateway:
        answer = await gateway.http.post(path, json={"model": "mock", **fields})
    assert answer.status_code == 200
    reader(kind).validate_python(answer.json())


async def test_model_is_of_the_clients_type(serving):
    async with serving() as gateway:
        listed = (await gateway.http.get("/v1/models")).json()
    reader(list[Model]).validate_python(listed["data"])


STREAMS = {
    "chat": ("/v1/chat/completions", ChatCompletionChunk, {**CHAT, "stream_options": {"include_usage": True}}),
    "chat that was cut": ("/v1/chat/completions", ChatCompletionChunk, {**CHAT, "max_tokens": 4}),
    "chat with logprobs": ("/v1/chat/completions", ChatCompletionChunk, {"messages": MESSAGES, "logprobs": True}),
    "response": ("/v1/responses", ResponseStreamEvent, RESPONSE),
    "response that was cut": ("/v1/responses", ResponseStreamEvent, {**RESPONSE, "max_output_tokens": 4}),
    "message": ("/v1/messages", RawMessageStreamEvent, MESSAGE),
    "message that was cut": ("/v1/messages", RawMessageStreamEvent, {**MESSAGE, "max_tokens": 4}),
}
BESIDE = ("ping",)
"""Events of Anthropic's that its clients skip by their names."""


@pytest.mark.parametrize(("path", "kind", "fields"), STREAMS.values(), ids=STREAMS.keys())
async def test_every_event_of_a_stream_is_of_the_clients_type(serving, path, kind, fields):
    async with serving() as gateway:
        answer = await gateway.http.post(path, json={"model": "mock", "stream": True, **fields})
    reported = [document for document in documents(answer.text) if document.get("type") not in BESIDE]
    assert len(reported) > 1
    for document in reported:
        reader(kind).validate_python(document)


async def test_end_of_a_response_that_failed_is_of_the_clients_type(serving):
    async with serving(die_after=40, step_s=0.005) as gateway:
        answer = await gateway.http.post("/v1/responses", json={"model": "mock", "stream": True, **RESPONSE})
    reported = documents(answer.text)
    assert reported[-1]["type"] == "response.failed"
    for document in reported:
        reader(ResponseStreamEvent).validate_python(document)
