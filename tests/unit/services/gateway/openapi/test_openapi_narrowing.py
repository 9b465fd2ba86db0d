"""What the document says about values of requests beyond their types is what a gateway checks, line by line."""

import asyncio
import re
from typing import Any

import pytest

from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.gateway.api.anthropic.schemas import MessagesRequest
from tandem_services.gateway.api.embeddings import EmbeddingRequest
from tandem_services.gateway.api.openai_schemas import ChatRequest, CompletionRequest
from tandem_services.gateway.api.openapi.components import BOUNDS, REQUIRED, refused_fields
from tandem_services.gateway.api.openapi.document import Traits, openapi_document
from tandem_services.gateway.api.responses.schemas import ResponsesRequest
from tandem_services.gateway.api.sessions import CloseRequest, OpenRequest
from tandem_testing.gateway_builders import EngineRack, live_gateway
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.tokenizer_builders import EOS, THINKING_CHATML, write_tokenizer

SOUND: dict[type, tuple[str, dict[str, Any]]] = {
    ChatRequest: (
        "/v1/chat/completions",
        {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    ),
    CompletionRequest: ("/v1/completions", {"model": "mock", "prompt": "hi", "max_tokens": 1}),
    ResponsesRequest: ("/v1/responses", {"model": "mock", "input": "hi", "max_output_tokens": 1}),
    MessagesRequest: (
        "/v1/messages",
        {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    ),
    EmbeddingRequest: ("/v1/embeddings", {"model": "mock", "input": "hi"}),
    OpenRequest: ("/v1/sessions", {}),
    CloseRequest: ("/close_session", {"session_id": "s"}),
}
WITH: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "logprob_start": {"prompt_logprobs": 1},
    "best_of": {"n": 1},
}
"""What a field needs beside it."""
OUTPUT_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MAX_BEST_OF = 20
"""With n=1: more than that only n itself may ask for."""
ITEMS: dict[str, Any] = {
    "stop": lambda n: [f"stop {i}" for i in range(n)],
    "stop_sequences": lambda n: [f"stop {i}" for i in range(n)],
    "bad_words": lambda n: [f"w{i}" for i in range(n)],
    "allowed_token_ids": lambda n: [5] * n,
    "logprob_token_ids": lambda n: [5] * n,
    "stop_token_ids": lambda n: [5] * n,
    "messages": lambda n: [{"role": "user", "content": ""}] * n,
    "tools": lambda n: [{"type": "function", "function": {"name": f"f{i}"}} for i in range(n)],
    "tools of responses": lambda n: [{"type": "function", "name": f"f{i}"} for i in range(n)],
    "tools of messages": lambda n: [{"name": f"f{i}", "input_schema": {"type": "object"}} for i in range(n)],
}


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Status and error of a request with some fields of its own."""
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), chat_template=THINKING_CHATML)
    tokenizer = TextTokenizer.load(folder)
    with EngineRack() as rack, asyncio.Runner() as runner:
        engine = rack.add("solo", MockBehavior(token=hash_tokens(3, 250), eos=EOS))
        engine.context_length = 2**17
        living = live_gateway(rack.context, tokenizer, rack.engines)
        gateway = runner.run(living.__aenter__())

        def post(shape, **fields):
            path, sound = SOUND[shape]
            body = {name: value for name, value in {**sound, **fields}.items() if value is not ...}
            answer = runner.run(gateway.http.post(path, json=body))
            error = (answer.json().get("error") if answer.content else None) or {}
            # Anthropic's shape has no place for the field: it begins the message.
            field = re.match(r"[\w.]*", error.get("message", ""))
            return answer.status_code, {"param": field and field[0], **error}

        yield post
        runner.run(living.__aexit__(None, None, None))


@pytest.mark.parametrize(
    ("shape", "field"),
    [(shape, field) for shape, fields in REQUIRED.items() for field in fields],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.parametrize("given", [..., None], ids=["absent", "null"])
def test_required_field_is_required(ask, shape, field, given):
    status, error = ask(shape, **{field: given})
    assert (status, error["param"]) == (400, field)


def edges(bounds: dict[str, Any], field: str) -> tuple[list[Any], list[Any]]:
    """Values on the edge and beyond it."""
    inside: list[Any] = []
    beyond: list[Any] = []
    for keyword, limit in bounds.items():
        step = 1 if keyword.startswith("max") else -1
        if keyword in ("minimum", "maximum"):
            inside.append(limit)
            beyond.append(limit + step)
        elif keyword == "exclusiveMinimum":
            inside.append(limit + 1)
            beyond.append(limit)
        elif keyword.endswith("Length"):
            inside.append("a" * limit)
            beyond.append("a" * (limit + step))
        elif keyword.endswith("Items"):
            inside.append(ITEMS[field](limit))
            beyond.append(ITEMS[field](limit + step))
        elif field == "logit_bias":
            beyond.append({str(i): 1 for i in range(limit + 1)})
        else:
            inside.append({str(i): "x" for i in range(limit)})
            beyond.append({str(i): "x" for i in range(limit + step)})
    return inside, beyond


CASES = [(shape, field, bounds) for shape, fields in BOUNDS.items() for field, bounds in fields.items()]


@pytest.mark.parametrize(
    ("shape", "field", "bounds"), CASES, ids=[f"{shape.__name__}-{field}" for shape, field, _ in CASES]
)
def test_bound_is_where_the_document_says(ask, shape, field, bounds):
    needed = {"logprobs": shape is ChatRequest or 1} if field == "logprob_token_ids" else WITH.get(field, {})
    tools = {ResponsesRequest: "tools of responses", MessagesRequest: "tools of messages"}
    inside, beyond = edges(bounds, tools.get(shape, field) if field == "tools" else field)
    for value in inside:
        if field in OUTPUT_TOKENS and value > 1:
            # More than there is room for, which is another matter.
            assert "maximum context length" in ask(shape, **{field: value})[1]["message"]
            continue
        given = MAX_BEST_OF if field == "best_of" and value > 1 else value
        status, error = ask(shape, **needed, **{field: given})
        assert status == 200 or (shape is CloseRequest and status == 404), (value, error)
    for value in beyond:
        status, error = ask(shape, **needed, **{field: value})
        assert (status, error.get("param")) == (400, field), (value, error)


@pytest.fixture(scope="module")
def schemas():
    document = openapi_document(Traits(strict_fields=False, keys=False, metrics=True))
    return document["components"]["schemas"]


NEUTRAL = [
    (shape, field, values)
    for shape in (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest)
    for field, values in refused_fields(shape).items()
]


@pytest.mark.parametrize(
    ("shape", "field", "values"), NEUTRAL, ids=[f"{shape.__name__}-{field}" for shape, field, _ in NEUTRAL]
)
def test_refused_field_has_the_values_that_the_document_lists(ask, schemas, shape, field, values):
    listed = schemas[shape.__name__]["properties"][field]["enum"]
    assert listed == [None, *values]
    for value in listed:
        assert ask(shape, **{field: value})[0] == 200, value
    status, error = ask(shape, **{field: "something else"})
    assert (status, error["param"]) == (400, field)
