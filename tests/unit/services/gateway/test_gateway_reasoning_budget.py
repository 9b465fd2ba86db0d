"""`thinking_token_budget`: what engines are asked for, what is refused, and other names of the field."""

import json

import pytest

from tandem_engine.messages.grammar import GrammarKind
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_testing.gateway_builders import EngineRack, live_gateway, script
from tandem_testing.mock_engine import MockBehavior, hash_tokens, scripted_tokens
from tandem_testing.tokenizer_builders import EOS, THINKING_CHATML, write_tokenizer

FIELD = "thinking_token_budget"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory) -> TextTokenizer:
    return TextTokenizer.load(write_tokenizer(tmp_path_factory.mktemp("thinking"), chat_template=THINKING_CHATML))


@pytest.fixture
def says(thinking, rack):
    """A gateway whose engine writes a text."""

    def start(text: str, **config):
        behavior = MockBehavior(token=scripted_tokens(script(thinking, text, eos=EOS)), eos=EOS)
        rack.add("solo", behavior).context_length = 4096
        return live_gateway(rack.context, thinking, rack.engines, recovery_s=0.1, **config)

    return start


def sampling_of(rack: EngineRack) -> SamplingParams:
    return rack.engines[0].received[-1].sampling


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_engine_request_has_reasoning_budget_and_markers(says, rack, thinking, opened, stream):
    async with says("ok") as gateway:
        answer = await gateway.chat(
            stream=stream, n=2, **{FIELD: 7}, chat_template_kwargs={"enable_thinking": opened}, stop="x"
        )
    assert answer.status_code == 200
    begin, end = (tuple(thinking.encode(text, add_special_tokens=False)) for text in ("<think>", "</think>"))
    for request in rack.engines[0].received:
        budget = request.sampling.reasoning_budget
        assert (budget.tokens, budget.begin, budget.end, budget.opened) == (7, begin, end, opened)


@pytest.mark.parametrize("value", [None, 0, 2**31 - 1])
async def test_accepted_reasoning_budgets_reach_the_engine(says, rack, value):
    async with says("ok") as gateway:
        assert (await gateway.chat(**{FIELD: value})).status_code == 200
    budget = sampling_of(rack).reasoning_budget
    assert (budget and budget.tokens) == value


@pytest.mark.parametrize("fields", [{}, {FIELD: 20}])
async def test_with_a_budget_a_schema_begins_behind_the_reasoning(says, rack, fields):
    wanted = {"response_format": {"type": "json_object"}, "chat_template_kwargs": {"enable_thinking": True}}
    async with says('Rain?</think>{"a": 1}') as gateway:
        message = (await gateway.chat(**wanted, **fields)).json()["choices"][0]["message"]
    assert sampling_of(rack).grammar.kind is GrammarKind.JSON_OBJECT
    if fields:
        assert (message["reasoning_content"], message["content"]) == ("Rain?", '{"a": 1}')
    else:
        assert message["content"] == 'Rain?</think>{"a": 1}'


BAD = [
    ({FIELD: -1}, FIELD),
    ({FIELD: 2**31}, FIELD),
    ({FIELD: 2**70}, FIELD),
    ({FIELD: 1.5}, FIELD),
    ({FIELD: "7"}, FIELD),
    ({FIELD: True}, FIELD),
    ({FIELD: [7]}, FIELD),
    ({FIELD: 7, "allowed_token_ids": [5]}, "allowed_token_ids"),
    ({FIELD: 7, "bad_words": ["</think>"]}, "bad_words"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: json.dumps(value)[:60])
async def test_bad_budget_is_named(says, rack, fields, param):
    async with says("ok") as gateway:
        answer = await gateway.chat(**fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not rack.engines[0].received


async def test_reasoning_end_as_stop_token_with_min_tokens_is_400(says, thinking):
    ids = thinking.encode("</think>", add_special_tokens=False)[-1:]
    async with says("ok") as gateway:
        fields = {FIELD: 7, "stop_token_ids": [*ids]}
        assert (await gateway.chat(**fields)).status_code == 200
        answer = await gateway.chat(min_tokens=2, max_tokens=9, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stop_token_ids")


async def test_without_known_markers_a_budget_is_refused(says):
    async with says("ok", reasoning_parser="none") as gateway:
        answer = await gateway.chat(**{FIELD: 7})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, FIELD)
        assert "markers" in answer.json()["error"]["message"]


async def test_completions_refuse_it_and_say_why(says):
    async with says("ok") as gateway:
        answer = await gateway.complete("hi", **{FIELD: 7})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, FIELD)
    assert "ask for a chat" in answer.json()["error"]["message"]


# Other endpoints


async def message(gateway, **fields):
    return await gateway.http.post("/v1/messages", json={"model": "mock", "max_tokens": 9, "messages": HI, **fields})


async def test_budget_tokens_of_a_message_are_the_budget(says, rack):
    async with says("ok") as gateway:
        assert (await message(gateway, thinking={"type": "enabled", "budget_tokens": 5})).status_code == 200
        budget = sampling_of(rack).reasoning_budget
        assert (budget.tokens, budget.opened) == (5, True)
        assert (await message(gateway, thinking={"type": "disabled", "budget_tokens": 5})).status_code == 200
        assert sampling_of(rack).reasoning_budget is None
        refused = await message(gateway, thinking={"type": "enabled", "budget_tokens": -1})
    assert refused.status_code == 400
    assert "thinking.budget_tokens" in refused.json()["error"]["message"]


async def test_model_that_does_not_reason_needs_no_budget_for_messages(says, rack):
    async with says("ok", reasoning_parser="none") as gateway:
        assert (await message(gateway, thinking={"type": "enabled", "budget_tokens": 5})).status_code == 200
    assert sampling_of(rack).reasoning_budget is None


async def test_max_tokens_of_a_response_s_reasoning_are_the_budget(says, rack):
    async with says("ok") as gateway:
        body = {"model": "mock", "input": "hi", "reasoning": {"max_tokens": 5}}
        assert (await gateway.http.post("/v1/responses", json=body)).status_code == 200
    assert sampling_of(rack).reasoning_budget.tokens == 5


# Another worker


async def test_output_that_moves_keeps_its_budget(thinking):  # [resume-from-tokens]
    with EngineRack() as rack:
        rack.add("a", MockBehavior(token=hash_tokens(3, 250), eos=EOS, die_after=4))
        rack.add("b", MockBehavior(token=hash_tokens(3, 250), eos=EOS))
        async with live_gateway(rack.context, thinking, rack.engines, ping_interval_s=2.0) as gateway:
            answer = await gateway.chat(max_tokens=12, **{FIELD: 7})
    assert answer.status_code == 200
    first, second = (engine.received[0] for engine in rack.engines)
    assert second.resume_ids
    assert first.sampling.reasoning_budget == second.sampling.reasoning_budget
