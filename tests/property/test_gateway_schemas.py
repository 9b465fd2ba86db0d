"""Whatever a request says in the shapes that a gateway decodes, it is served or refused by name: never a 5xx.

Bodies are generated from the JSON schemas of the request structs themselves, so that a new field is in them at once; in
some a value is replaced by one of no shape at all.
"""

import asyncio
import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.gateway.embedding_schemas import EmbeddingRequest
from tandem_services.gateway.messages.schemas import MessagesRequest
from tandem_services.gateway.openai_schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tandem_services.gateway.responses.schemas import ResponsesRequest
from tandem_testing.gateway_builders import EngineRack, live_gateway
from tandem_testing.mock_engine import MockBehaviour, hash_tokens
from tandem_testing.tokenizer_builders import EOS, write_tokenizer

Schema = dict[str, Any]

HI = [{"role": "user", "content": "hi"}]
REQUESTS: dict[str, tuple[type[msgspec.Struct], Schema]] = {
    "/v1/chat/completions": (ChatRequest, {"model": "mock", "messages": HI, "max_tokens": 2}),
    "/v1/completions": (CompletionRequest, {"model": "mock", "prompt": "hi", "max_tokens": 2}),
    "/v1/responses": (ResponsesRequest, {"model": "mock", "input": "hi", "max_output_tokens": 2}),
    "/v1/messages": (MessagesRequest, {"model": "mock", "messages": HI, "max_tokens": 2}),
    "/v1/messages/count_tokens": (MessagesRequest, {"model": "mock", "messages": HI}),
    "/v1/embeddings": (EmbeddingRequest, {"model": "mock", "input": "hi"}),
    "/tokenize": (TokenizeRequest, {"prompt": "hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
}

CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

TEXTS = st.sampled_from(["", "a", "mock", "f", "\x00\x1b", "\u00e9\U0001f600", "<|im_end|>", "a" * 300]) | st.text(
    max_size=5
)
INTEGERS = st.sampled_from([-(2**63) - 1, -1, 0, 1, 2, 5, 20, 129, 2**31, 2**63, 10**30]) | st.integers(-3, 30)
NUMBERS = st.sampled_from([-1e308, -1.0, 0.0, 1e-12, 0.5, 1.0, 2.0, 1e308]) | st.floats(
    allow_nan=False, allow_infinity=False
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | INTEGERS | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
SIMPLE = {"string": TEXTS, "integer": INTEGERS, "number": NUMBERS, "boolean": st.booleans(), "null": st.none()}


def values(schema: Schema, definitions: Schema) -> st.SearchStrategy[Any]:
    """JSON that fits a schema as msgspec writes them."""
    if "$ref" in schema:
        return values(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        return st.one_of([values(option, definitions) for option in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "array":
            return st.lists(values(schema.get("items", {}), definitions), max_size=3)
        case "object" if "properties" in schema:
            return objects(schema, definitions)
        case "object":
            return st.dictionaries(TEXTS, values(schema.get("additionalProperties") or {}, definitions), max_size=3)
        case str(kind):
            return SIMPLE[kind]
    return ANYTHING


def objects(schema: Schema, definitions: Schema) -> st.SearchStrategy[Schema]:
    """All that is required and up to four fields that are not."""
    fields = {
        name: st.deferred(lambda field=field: values(field, definitions))
        for name, field in schema["properties"].items()
    }
    required = {name: fields.pop(name) for name in schema.get("required", ())}
    chosen = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True) if fields else st.just([])
    return chosen.flatmap(lambda names: st.fixed_dictionaries(required | {name: fields[name] for name in names}))


@st.composite
def bodies(draw: st.DrawFn, path: str) -> Schema:
    """A sound request with some fields as its schema allows them, and perhaps one as nothing allows it."""
    shape, sound = REQUESTS[path]
    (schema,), definitions = msgspec.json.schema_components([shape], ref_template="#/{name}")
    body = {**sound, **draw(values(schema, definitions))}
    if draw(st.booleans()):
        body |= {name: sound[name] for name in sound}
    if draw(st.integers(0, 9)) == 0:
        body[draw(st.sampled_from(sorted(body)))] = draw(ANYTHING)
    return body


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Send one body to a gateway that lives as long as the module."""
    tokenizer = TextTokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    with EngineRack() as rack, asyncio.Runner() as runner:
        rack.add("solo", MockBehaviour(token=hash_tokens(3, 250), eos=EOS))
        living = live_gateway(rack.context, tokenizer, rack.engines, request_timeout_s=30.0)
        gateway = runner.run(living.__aenter__())
        yield lambda path, body: runner.run(gateway.http.post(path, content=json.dumps(body).encode()))
        runner.run(living.__aexit__(None, None, None))


@pytest.mark.parametrize("path", REQUESTS)
@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_fits_the_schema_is_served_or_refused_by_name(ask, path, data):
    body = data.draw(bodies(path))
    answer = ask(path, body)
    if answer.status_code == 200:
        return
    # Who allows no time gets none.
    assert answer.status_code < 500 or (answer.status_code == 504 and body.get("timeout") is not None), answer.text
    error = answer.json()["error"]
    if path.startswith("/v1/messages"):
        assert set(error) == {"type", "message"}
        assert not CONTROLS.search(error["message"])
        return
    assert set(error) == {"message", "type", "param", "code"}
    assert not CONTROLS.search(error["message"])
    assert error["param"] or answer.status_code == 504, (error, body)


@pytest.mark.parametrize("path", REQUESTS)
def test_the_sound_request_is_served(ask, path):
    assert ask(path, REQUESTS[path][1]).status_code == 200
