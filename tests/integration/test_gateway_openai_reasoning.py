"""The official OpenAI client bounds the reasoning of the bundled model, whose tokens a real engine computes."""

import json
from pathlib import Path

import msgspec
import openai
import pytest

from tandem_engine.config import CacheConfig, EngineConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import load
from tandem_engine.messages.requests import GenerateRequest
from tandem_testing.gateway_builders import EngineRack, live_gateway
from tandem_testing.mock_engine import MockBehavior

MODEL = Path(__file__).resolve().parents[2] / "models" / "tandem-mini"
LEGS = {
    "type": "object",
    "properties": {"legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["legs"],
    "additionalProperties": False,
}
FIELDS = {
    "model": "mock",
    "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
    "temperature": 0,
    "max_tokens": 40,
}


class ComputedTokens:
    """Tokens of requests as a real engine chooses them, whole outputs at once."""

    def __init__(self, engine: Engine, eos: int) -> None:
        self._engine = engine
        self._eos = eos
        self._outputs: dict[str, tuple[int, ...]] = {}

    def __call__(self, request: GenerateRequest, position: int) -> int:
        if request.rid not in self._outputs:
            asked = msgspec.structs.replace(request, handoff=None, group="", deadline_s=None)
            (output,) = self._engine.generate([asked])
            self._outputs[request.rid] = (*request.resume_ids, *output.token_ids)
        whole = self._outputs[request.rid]
        # A grammar that has ended ends the output without a token of its own.
        return whole[position] if position < len(whole) else self._eos


@pytest.fixture(scope="module")
def loaded():
    config = EngineConfig(model_path=str(MODEL), dtype="float32", cache=CacheConfig(num_pages=300), threads=1)
    return load(config, progress=False)


@pytest.fixture
async def client(loaded):
    eos = min(loaded.model.config.eos_token_ids)
    with Engine.build(loaded, loaded.config) as engine, EngineRack() as rack:
        behavior = MockBehavior(token=ComputedTokens(engine, eos), eos=eos)
        rack.add("only", behavior).context_length = 4096
        async with (
            live_gateway(rack.context, loaded.text, rack.engines, reasoning_parser="deepseek_r1") as gateway,
            openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield client


async def test_answer_begins_when_the_budget_is_spent(client, loaded):
    free = await client.chat.completions.create(**FIELDS)
    assert (free.choices[0].message.content, free.usage.completion_tokens) == ("", 40)
    end = loaded.text.encode("</think>", add_special_tokens=False)
    for budget in (0, 6):
        bounded = {**FIELDS, "extra_body": {"thinking_token_budget": budget}}
        answer = await client.chat.completions.create(**bounded)
        message = answer.choices[0].message
        thought = getattr(message, "reasoning_content", "")
        assert free.choices[0].message.reasoning_content.startswith(thought)
        assert bool(thought) == bool(budget)
        assert message.content
        # That the marker has ended the reasoning is known with its last token.
        assert answer.usage.completion_tokens_details.reasoning_tokens == budget + len(end) - 1
        stream = await client.chat.completions.create(**bounded, n=2, logprobs=True, stream=True)
        deltas = [choice async for chunk in stream for choice in chunk.choices]
        for index in (0, 1):
            own = [choice.delta for choice in deltas if choice.index == index]
            assert "".join(delta.content or "" for delta in own) == message.content
            assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in own) == thought


async def test_schema_applies_after_the_reasoning(client):
    wanted = {"type": "json_schema", "json_schema": {"name": "animal", "schema": LEGS, "strict": True}}
    fields = {**FIELDS, "max_tokens": 80, "response_format": wanted}
    answer = (await client.chat.completions.create(**fields, extra_body={"thinking_token_budget": 6})).choices[0]
    assert answer.message.reasoning_content
    assert 0 <= json.loads(answer.message.content)["legs"] <= 9
    assert answer.finish_reason == "stop"


async def test_bad_budget_is_named(client):
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**FIELDS, extra_body={"thinking_token_budget": -1})
    assert refused.value.param == "thinking_token_budget"
