"""Real answers have exactly the fields that the document gives them, streamed ones too."""

import json

import pytest

from tandem_engine.config import Role
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.gateway.api.openapi.document import Traits, openapi_document
from tandem_testing.gateway_builders import EngineRack, events, live_gateway, script
from tandem_testing.mock_engine import MockBehavior, scripted_tokens
from tandem_testing.openapi_contract import Contract
from tandem_testing.tokenizer_builders import EOS, THINKING_CHATML, write_tokenizer

OUTPUT = (
    "<think>\nRain?\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
)
HI = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
MESSAGES_TOOL = {"name": "weather", "input_schema": {"type": "object"}}
RESPONSES_TOOL = {"type": "function", **FUNCTION}
CHAT = {"model": "mock", "messages": HI}
TEXT = {"model": "mock", "prompt": "hi"}
RESPONSE = {"model": "mock", "input": "hi"}

SESSION = [
    ("POST", "/v1/chat/completions", {**CHAT, "tools": [TOOL], "n": 2}),
    ("POST", "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}),
    ("POST", "/v1/chat/completions", {**CHAT, "max_tokens": 2, "stop": "a"}),
    ("POST", "/v1/chat/completions", {**CHAT, "temperature": 3}),
    ("POST", "/v1/chat/completions", {**CHAT, "model": "other"}),
    ("POST", "/v1/completions", {**TEXT, "logprobs": 2, "echo": True, "n": 2}),
    ("POST", "/v1/completions", {**TEXT, "prompt_logprobs": 0, "max_tokens": 0, "echo": True}),
    ("POST", "/v1/completions", {**TEXT, "timeout": 1e-9}),
    ("POST", "/v1/completions", {**TEXT, "session_params": {"id": "unknown", "turn": 5}}),
    ("POST", "/v1/responses", {**RESPONSE, "tools": [RESPONSES_TOOL], "metadata": {"a": "b"}}),
    ("POST", "/v1/responses", {**RESPONSE, "max_output_tokens": 2, "tool_choice": "none"}),
    ("POST", "/v1/responses", {**RESPONSE, "text": {"format": {"type": "json_object"}}, "instructions": "x"}),
    ("POST", "/v1/messages", {**CHAT, "max_tokens": 99, "tools": [MESSAGES_TOOL]}),
    ("POST", "/v1/messages", {**CHAT, "max_tokens": 99, "stop_sequences": ["see"]}),
    ("POST", "/v1/messages", {**CHAT}),
    ("POST", "/v1/messages", {**CHAT, "max_tokens": 9, "model": "other"}),
    ("POST", "/v1/messages/count_tokens", {**CHAT}),
    ("POST", "/v1/embeddings", {**RESPONSE}),
    ("POST", "/v1/embeddings", {**RESPONSE, "encoding_format": "base64"}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/mock", None),
    ("GET", "/v1/models/some/other", None),
    ("GET", "/v1/requests/mine/explain", None),
    ("GET", "/v1/requests/nobody/explain", None),
    ("POST", "/v1/sessions", {"session_id": "s"}),
    ("POST", "/v1/sessions", {"session_id": "s"}),
    ("DELETE", "/v1/sessions/s", None),
    ("DELETE", "/v1/sessions/s", None),
    ("POST", "/open_session", {}),
    ("POST", "/tokenize", {"prompt": "hi", "return_token_strs": True}),
    ("POST", "/v1/tokenize", {"messages": HI, "tools": [TOOL]}),
    ("POST", "/v1/detokenize", {"tokens": [5]}),
    ("GET", "/live", None),
    ("GET", "/ready", None),
    ("GET", "/health", None),
    ("GET", "/version", None),
    ("GET", "/openapi.json", None),
]
GENERATION = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
STREAMED = [body for body in SESSION if body[1] in GENERATION]


@pytest.fixture
async def gateway(tmp_path):
    tokenizer = TextTokenizer.load(write_tokenizer(tmp_path, chat_template=THINKING_CHATML))
    ids = script(tokenizer, OUTPUT, eos=EOS)
    with EngineRack() as rack:
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
            rack.add(name, MockBehavior(token=scripted_tokens(ids), eos=EOS), role).context_length = 4096
        async with live_gateway(rack.context, tokenizer, rack.engines) as live:
            yield live


@pytest.fixture(scope="module")
def contract() -> Contract:
    return Contract(openapi_document(Traits(strict_fields=False, keys=False, metrics=True)))


async def test_whole_answers_have_the_fields_of_the_document(gateway, contract):
    statuses = []
    for method, path, body in SESSION:
        answer = await gateway.http.request(method, path, json=body, headers={"X-Request-Id": "mine"})
        contract.check(method, path, answer.status_code, answer.headers["content-type"], answer.json())
        statuses.append(answer.status_code)
    assert sorted(set(statuses)) == [200, 400, 404, 409, 504]


async def test_streams_have_the_events_of_the_document(gateway, contract):
    streamed = 0
    for method, path, body in STREAMED:
        options = {"stream_options": {"include_usage": True}} if "completions" in path else {}
        answer = await gateway.http.request(method, path, json={**body, "stream": True, **options})
        if answer.status_code != 200:
            contract.check(method, path, answer.status_code, answer.headers["content-type"], answer.json())
            continue
        assert answer.headers["content-type"].partition(";")[0] == "text/event-stream"
        contract.check_events(method, path, documents(answer))
        streamed += 1
    assert streamed >= 8


def documents(answer) -> list[dict]:
    """What the events of either manner carry."""
    if "event: " not in answer.text:
        return events(answer)
    found = [json.loads(line.partition("data: ")[2]) for line in answer.text.split("\n") if line.startswith("data: ")]
    assert found[-1]["type"] in ("response.completed", "response.incomplete", "message_stop")
    return found


async def test_response_in_an_event_is_a_response(gateway, contract):
    answer = await gateway.http.post("/v1/responses", json={**RESPONSE, "tools": [RESPONSES_TOOL], "stream": True})
    whole = {"$ref": "#/components/schemas/ResponseObject"}
    found = [document["response"] for document in documents(answer) if "response" in document]
    assert [response["status"] for response in found] == ["in_progress", "in_progress", "completed"]
    for response in found:
        contract.validate(whole, response)


async def test_metrics_are_text_as_the_document_says(gateway, contract):
    answer = await gateway.http.get("/metrics")
    contract.check("GET", "/metrics", 200, answer.headers["content-type"], answer.text)


async def test_gateway_that_is_not_ready_says_so_as_the_document_does(tokenizer, contract):
    with EngineRack() as rack:
        async with live_gateway(rack.context, tokenizer, []) as gateway:
            for path in ("/ready", "/health"):
                answer = await gateway.http.get(path)
                assert answer.status_code == 503
                contract.check("GET", path, 503, answer.headers["content-type"], answer.json())
            refused = await gateway.complete()
            contract.check("POST", "/v1/completions", refused.status_code, "application/json", refused.json())
            assert refused.status_code == 503
