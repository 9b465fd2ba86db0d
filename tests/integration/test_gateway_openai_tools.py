"""The official OpenAI client uses tools, reasoning and responses against a gateway that listens."""

import json

import openai
import pytest

from tandem_engine.config import Role
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_testing.gateway_builders import EngineRack, live_gateway, script
from tandem_testing.mock_engine import MockBehavior, scripted_tokens
from tandem_testing.tokenizer_builders import EOS, THINKING_CHATML, write_tokenizer

HI = [{"role": "user", "content": "Weather in Bern?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": PARAMETERS}}
RESPONSES_TOOL = {"type": "function", "name": "weather", "strict": True, "parameters": PARAMETERS}
OUTPUT = (
    "<think>\nRain?\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Genf"}}\n</tool_call>'
)


@pytest.fixture
async def client(tmp_path):
    tokenizer = TextTokenizer.load(write_tokenizer(tmp_path, chat_template=THINKING_CHATML))
    ids = script(tokenizer, OUTPUT, eos=EOS)
    with EngineRack() as rack:
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
            rack.add(name, MockBehavior(token=scripted_tokens(ids), eos=EOS), role).context_length = 4096
        async with (
            live_gateway(rack.context, tokenizer, rack.engines, ping_interval_s=2.0) as live,
            openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield client


async def test_clients_accumulator_puts_streamed_calls_together(client):
    whole = await client.chat.completions.create(model="mock", messages=HI, tools=[TOOL])
    async with client.chat.completions.stream(model="mock", messages=HI, tools=[TOOL], n=2) as stream:
        seen = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in seen
    assert seen.count("tool_calls.function.arguments.done") == 4
    for choice in (*whole.choices, *final.choices):
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
        calls = choice.message.tool_calls
        assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Bern", "Genf"]
    ids = [call.id for choice in final.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 4
    assert whole.choices[0].message.reasoning_content == "Rain?"


async def test_conversation_with_tool_results_completes(client):
    first = await client.chat.completions.create(model="mock", messages=HI, tools=[TOOL])
    message = first.choices[0].message
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    messages = [*HI, message.model_dump(exclude_none=True), *answers]
    second = await client.chat.completions.create(model="mock", messages=messages, tools=[TOOL])
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


async def test_bad_tool_is_the_clients_own_error(client):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="mock", messages=HI, tools=[TOOL, TOOL])
    assert caught.value.param == "tools[1].function.name"


async def test_response_is_created_and_sent_back(client):
    response = await client.responses.create(
        model="mock", input="Weather in Bern?", instructions="Be brief.", tools=[RESPONSES_TOOL]
    )
    assert response.output_text == "Let me see."
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    calls = [item for item in response.output if item.type == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
    turns = [
        {"role": "user", "content": "Weather in Bern?"},
        *(item.model_dump() for item in response.output),
        *outputs,
    ]
    second = await client.responses.create(model="mock", input=turns, tools=[RESPONSES_TOOL])
    assert second.status == "completed"
    assert second.usage.input_tokens > response.usage.input_tokens


async def test_response_is_streamed(client):
    stream = await client.responses.create(model="mock", input="hi", tools=[RESPONSES_TOOL], stream=True)
    found = [event async for event in stream]
    assert [found[0].type, found[1].type, found[-1].type] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    text = "".join(event.delta for event in found if event.type == "response.output_text.delta")
    assert text == found[-1].response.output_text == "Let me see."


async def test_clients_accumulator_puts_a_streamed_response_together(client):
    async with client.responses.stream(model="mock", input="hi", tools=[RESPONSES_TOOL]) as stream:
        seen = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert seen.count("response.output_item.done") == len(final.output) == 4
    assert final.output_text == "Let me see."


async def test_refused_response_is_the_clients_own_error(client):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="mock", input="hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
