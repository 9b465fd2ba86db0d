"""The official OpenAI client against a gateway that listens, with a prefill and a decode mock engine."""

import asyncio

import openai
import pytest

from tandem_engine.config import Role
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_testing.gateway_builders import EngineRack, live_gateway, script
from tandem_testing.mock_engine import MockBehavior, hash_tokens, scripted_tokens
from tandem_testing.tokenizer_builders import EOS, THINKING_CHATML, write_tokenizer

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def gateway(tmp_path):
    tokenizer = TextTokenizer.load(write_tokenizer(tmp_path))
    with EngineRack() as rack:
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
            rack.add(name, MockBehavior(token=hash_tokens(3, 250), eos=EOS), role)
        async with live_gateway(rack.context, tokenizer, rack.engines) as live:
            yield live


@pytest.fixture
async def client(gateway):
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_chat_whole_and_streamed_agree(client):
    fields = {"model": "mock", "messages": HI, "max_tokens": 12, "seed": 4}
    whole = await client.chat.completions.create(**fields)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    stream = await client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


async def test_clients_own_accumulator_understands_the_stream(tmp_path):
    tokenizer = TextTokenizer.load(write_tokenizer(tmp_path))
    with EngineRack() as rack:
        ids = script(tokenizer, "hello there", eos=EOS)
        rack.add("only", MockBehavior(token=scripted_tokens(ids), eos=EOS))
        async with (
            live_gateway(rack.context, tokenizer, rack.engines) as gateway,
            openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
            client.chat.completions.stream(model="mock", messages=HI, n=2, logprobs=True, top_logprobs=1) as stream,
        ):
            final = await stream.get_final_completion()
    assert [choice.finish_reason for choice in final.choices] == ["stop", "stop"]
    assert [choice.message.content for choice in final.choices] == ["hello there", "hello there"]
    assert [len(choice.logprobs.content) for choice in final.choices] == [len(ids), len(ids)]


async def test_completions_whole_and_streamed_agree(client):
    fields = {"model": "mock", "prompt": ["one", "two"], "max_tokens": 6, "seed": 4, "n": 2, "logprobs": 1}
    whole = await client.completions.create(**fields)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert len(whole.choices[0].logprobs.tokens) == 6
    texts = ["", "", "", ""]
    async for chunk in await client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


async def test_models_are_listed_and_retrieved(client):
    assert [model.id async for model in client.models.list()] == ["mock"]
    assert (await client.models.retrieve("mock")).id == "mock"


async def test_errors_arrive_as_the_clients_own_types(client):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="mock", messages=HI, temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.completions.create(model="mock", prompt=[7] * 600, stream=True)


async def test_sampling_fields_of_vllm_reach_the_engine_from_responses(client):
    fields = {"model": "mock", "input": "hi", "max_output_tokens": 4}
    extra = {"stop": ["x"], "stop_token_ids": [9], "logit_bias": {"7": 1}, "presence_penalty": 0.5, "seed": 1}
    answer = await client.responses.create(**fields, extra_body=extra)
    assert answer.status in ("completed", "incomplete")
    for name, value in {"stop_regex": "a+", "n": 2, "messages": HI}.items():
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**fields, extra_body={name: value})
        assert caught.value.param == name


async def test_tools_with_a_format_and_allowed_tools(tmp_path):
    tokenizer = TextTokenizer.load(write_tokenizer(tmp_path, chat_template=THINKING_CHATML))
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("f", "g")]
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}
    ids = script(tokenizer, '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>', eos=EOS)
    with EngineRack() as rack:
        rack.add("only", MockBehavior(token=scripted_tokens(ids), eos=EOS)).context_length = 4096
        async with (
            live_gateway(rack.context, tokenizer, rack.engines) as gateway,
            openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
        ):
            answer = await client.chat.completions.create(
                model="mock",
                messages=[*HI, {"role": "assistant", "content": None}, *HI],
                tools=tools,
                tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
                response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
                reasoning_effort="none",
                stop=["1", "2", "3", "4", "5"],
            )
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("f", '{"a": "b"}')
    assert answer.choices[0].finish_reason == "tool_calls"


async def test_request_id_of_the_client_object_can_be_explained(client, gateway):
    answer = await client.completions.create(model="mock", prompt="a", max_tokens=1)
    record = await gateway.http.get(f"/v1/requests/{answer._request_id}/explain")
    assert record.json()["status"] == 200


async def test_error_in_the_middle_of_a_stream_is_raised_by_the_client(tmp_path):
    tokenizer = TextTokenizer.load(write_tokenizer(tmp_path))
    with EngineRack() as rack:
        ids = tokenizer.encode("hello there")
        rack.add("only", MockBehavior(token=scripted_tokens(ids), die_after=3))
        async with (
            live_gateway(rack.context, tokenizer, rack.engines, recovery_s=0.1) as gateway,
            openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
        ):
            stream = await client.completions.create(model="mock", prompt="a", max_tokens=6, stream=True)
            with pytest.raises(openai.APIError, match="Try again later"):
                async for _ in stream:
                    pass


async def test_synchronous_client_works_too(gateway):
    def ask() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            fields = {"model": "mock", "messages": HI, "max_tokens": 8, "seed": 1}
            whole = client.chat.completions.create(**fields)
            parts = [
                chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**fields, stream=True)
            ]
            return whole.choices[0].message.content, "".join(parts)

    whole, streamed = await asyncio.to_thread(ask)
    assert whole == streamed
