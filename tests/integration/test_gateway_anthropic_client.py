"""The official Anthropic client uses messages, tools and thinking against a gateway that listens."""

import anthropic
import pytest

from tandem_engine.config import Role
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_testing.gateway_builders import EngineRack, live_gateway, script
from tandem_testing.key_files import key_of, write_keys
from tandem_testing.mock_engine import MockBehavior, scripted_tokens
from tandem_testing.tokenizer_builders import EOS, THINKING_CHATML, write_tokenizer

HI = [{"role": "user", "content": "Weather in Bern?"}]
TOOL = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ASKED = {"model": "mock", "max_tokens": 500, "messages": HI, "tools": [TOOL]}
OUTPUT = (
    "<think>\nRain?\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Genf"}}\n</tool_call>'
)


@pytest.fixture
async def client(tmp_path):
    tokenizer = TextTokenizer.load(write_tokenizer(tmp_path, chat_template=THINKING_CHATML))
    ids = script(tokenizer, OUTPUT, eos=EOS)
    keys = write_keys(tmp_path, ann={})
    with EngineRack() as rack:
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
            rack.add(name, MockBehavior(token=scripted_tokens(ids), eos=EOS), role).context_length = 4096
        async with (
            live_gateway(rack.context, tokenizer, rack.engines, api_keys=keys) as live,
            anthropic.AsyncAnthropic(base_url=live.url, api_key=key_of("ann"), max_retries=0) as client,
        ):
            yield client


async def test_anthropic_client_completes_tool_conversation(client):
    first = await client.messages.create(
        **ASKED, system="Be brief.", thinking={"type": "enabled", "budget_tokens": 1024}
    )
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (first.stop_reason, first.content[0].thinking, first.content[1].text) == ("tool_use", "Rain?", "Let me see.")
    calls = [block for block in first.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [{"city": "Bern"}, {"city": "Genf"}]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"} for call in calls]
    messages = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = await client.messages.create(**{**ASKED, "messages": messages})
    assert _prompt(second.usage) > _prompt(first.usage)


async def test_models_are_listed_and_a_prefill_is_continued(client):
    [model] = [model async for model in client.models.list()]
    assert (model.id, model.type, model.created_at.year > 2000) == ("mock", "model", True)
    begun = {"role": "assistant", "content": "It rains in"}
    message = await client.messages.create(model="mock", max_tokens=20, messages=[*HI, begun])
    assert message.stop_reason == "max_tokens"


async def test_clients_accumulator_puts_a_stream_together(client):
    whole = await client.messages.create(**ASKED)
    async with client.messages.stream(**ASKED) as stream:
        seen = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert (seen[0], seen[-1]) == ("message_start", "message_stop")
    assert {"thinking", "text", "input_json"} <= {*seen}
    assert [block.type for block in final.content] == [block.type for block in whole.content]
    assert [block.input for block in final.content if block.type == "tool_use"] == [{"city": "Bern"}, {"city": "Genf"}]
    assert (final.content[0].thinking, final.content[1].text) == ("Rain?", "Let me see.")
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
    assert final.usage.cache_read_input_tokens == whole.usage.cache_read_input_tokens > 0


async def test_tokens_are_counted(client):
    counted = await client.messages.count_tokens(model="mock", messages=HI, tools=[TOOL])
    answer = await client.messages.create(**ASKED)
    assert counted.input_tokens == _prompt(answer.usage)


async def test_gateway_errors_raise_exceptions_of_the_client_library(client):
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[1\].name") as bad:
        await client.messages.create(**{**ASKED, "tools": [TOOL, TOOL]})
    assert bad.value.request_id
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        await client.messages.create(**{**ASKED, "model": "other"})
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="wrong").messages.create(**ASKED)


def _prompt(usage) -> int:
    return usage.input_tokens + usage.cache_read_input_tokens
