"""Tools and schemas on the bundled model, which was trained on neither: only a grammar can make it get them right."""

import json

import openai
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("system")]

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Genf"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "forecast", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
ASK = [{"role": "user", "content": "What will the weather be in Bern?"}]
FIELDS = {"messages": ASK, "temperature": 0, "max_tokens": 200}


@pytest.fixture
async def client(fleet):
    async with openai.AsyncOpenAI(base_url=f"{fleet.system.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def streamed(client, fleet, **fields):
    async with client.chat.completions.stream(model=fleet.model, **FIELDS, **fields) as stream:
        return (await stream.get_final_completion()).choices[0]


def check_weather(call) -> None:
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather"
    assert set(arguments) == {"city", "days"}
    assert arguments["city"] in ("Bern", "Genf")
    assert 1 <= arguments["days"] <= 9


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_call_that_must_be_is_valid_whole_and_streamed(client, fleet, choice):
    fields = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    whole = (await client.chat.completions.create(model=fleet.model, **FIELDS, **fields)).choices[0]
    parts = await streamed(client, fleet, **fields)
    for answer in (whole, parts):
        assert answer.finish_reason == "tool_calls"
        assert not answer.message.content
        (call,) = answer.message.tool_calls
        check_weather(call)
    assert parts.message.tool_calls[0].function.arguments == whole.message.tool_calls[0].function.arguments


async def test_one_of_several_tools_is_called(client, fleet):
    answer = await streamed(client, fleet, tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.message.tool_calls
    if call.function.name == "weather":
        check_weather(call)
    else:
        assert (call.function.name, isinstance(json.loads(call.function.arguments), dict)) == ("time", True)


async def test_strict_tool_that_may_be_called_compiles_and_answers(client, fleet):
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    answer = await streamed(client, fleet, tools=[strict])
    assert answer.finish_reason in ("stop", "length", "tool_calls")
    for call in answer.message.tool_calls or ():
        check_weather(call)


async def test_schema_is_kept_while_it_is_streamed(client, fleet):
    form = {"type": "json_schema", "json_schema": {"name": "forecast", "strict": True, "schema": PARAMETERS}}
    answer = await streamed(client, fleet, response_format=form)
    assert answer.finish_reason == "stop"
    assert set(json.loads(answer.message.content)) == {"city", "days"}


async def test_response_follows_schema_and_required_tool_call(client, fleet):
    tool = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
    common = {"model": fleet.model, "input": ASK[0]["content"], "temperature": 0, "max_output_tokens": 200}
    response = await client.responses.create(
        **common, tools=[tool], tool_choice={"type": "function", "name": "weather"}
    )
    (call,) = response.output
    assert json.loads(call.arguments)["city"] in ("Bern", "Genf")
    form = {"format": {"type": "json_schema", "name": "forecast", "schema": PARAMETERS}}
    async with client.responses.stream(**common, text=form) as stream:
        final = await stream.get_final_response()
    assert set(json.loads(final.output_text)) == {"city", "days"}
