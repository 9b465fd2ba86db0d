"""The table of request fields against the protocols that clients are written for, on every route.

`protocols` has the field lists of OpenAI, Anthropic, vLLM and SGLang, each with its source and version.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.gateway.api.anthropic.schemas import MessagesRequest
from tandem_services.gateway.api.embeddings import EmbeddingRequest
from tandem_services.gateway.api.openai_schemas import ChatRequest, CompletionRequest, SharedFields
from tandem_services.gateway.api.responses.schemas import ResponsesRequest
from tandem_services.gateway.http.known_fields import KNOWN_FIELDS, WITHOUT_EFFECT, neutral_values, refused_fields
from tandem_testing.gateway_builders import EngineRack, live_gateway
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.tokenizer_builders import EOS, THINKING_CHATML, write_tokenizer

PROTOCOLS = sorted((Path(__file__).parent / "protocols").glob("*.json"))
CHAT = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": CHAT, "max_tokens": 1}),
    "/v1/completions": (CompletionRequest, {"prompt": "hi", "max_tokens": 1}),
    "/v1/responses": (ResponsesRequest, {"input": "hi", "max_output_tokens": 1}),
    "/v1/messages": (MessagesRequest, {"messages": CHAT, "max_tokens": 1}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "hi"}),
}
LISTED = {field for path in PROTOCOLS for fields in json.loads(path.read_text())["routes"].values() for field in fields}
GENERATION = [path for path in ROUTES if path != "/v1/embeddings"]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def engines():
    with EngineRack() as engines:
        engines.add("solo", MockBehavior(token=hash_tokens(3, 250), eos=EOS))
        yield engines


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(engines, tmp_path_factory):
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), chat_template=THINKING_CHATML)
    async with live_gateway(engines.context, TextTokenizer.load(folder), engines.engines, strict_fields=True) as live:
        yield live


async def post(gateway, path: str, **fields: Any):
    answer = await gateway.http.post(path, json={"model": "mock", **ROUTES[path][1], **fields})
    error = (answer.json() or {}).get("error") or {}
    # Anthropic's errors have no place for the field, and begin with it.
    return answer.status_code, error.get("param") or error.get("message", "").partition(" ")[0], error


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda path: path.stem)
async def test_field_lists_of_protocols_are_known(protocol):
    document = json.loads(protocol.read_text())
    assert document["source"]
    assert document["version"]
    listed = {field for fields in document["routes"].values() for field in fields}
    assert listed <= KNOWN_FIELDS


async def test_fields_of_structs_are_in_the_table():
    served = {field for shape, _ in ROUTES.values() for field in shape.__struct_encode_fields__}
    assert served <= KNOWN_FIELDS
    assert set(WITHOUT_EFFECT) <= served


async def test_fields_of_the_table_are_listed_or_our_own():
    ours = {"logprob_start", "parse_special_tokens", "pooling", "slo", "timeout"}
    # vLLM's and SGLang's of older versions, and fields of clients that set them beside the API's own.
    older = {"image_embeds", "container", "context_management", "mcp_servers"}
    assert ours | older >= KNOWN_FIELDS - LISTED


@pytest.mark.parametrize("path", ROUTES)
async def test_every_known_field_is_served_or_refused_by_name(gateway, path):
    shape, _ = ROUTES[path]
    refused = set(refused_fields(shape))
    assert refused | set(shape.__struct_encode_fields__) >= KNOWN_FIELDS
    for field in sorted(KNOWN_FIELDS & refused):
        status, param, error = await post(gateway, path, **{field: {"asks": "for something"}})
        assert (status, param) == (400, field), (field, error)


@pytest.mark.parametrize("path", ROUTES)
async def test_neutral_values_of_unsupported_fields_are_accepted(gateway, path):
    for field in refused_fields(ROUTES[path][0]):
        for value in (None, *neutral_values(field)):
            status, _, error = await post(gateway, path, **{field: value})
            assert status == 200, (field, value, error)


SERVED_EVERYWHERE = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"7": 2},
    "allowed_token_ids": [7, 8],
    "bad_words": ["quick"],
    "seed": 3,
    "stop_token_ids": [9],
    "ignore_eos": True,
    "structured_outputs": {"regex": "a+"},
    "guided_regex": "a+",
    "regex": "a+",
    "ebnf": 'root ::= "a"',
    "json_schema": {"type": "object"},
}


@pytest.mark.parametrize("field", [*SERVED_EVERYWHERE, "stop"])
async def test_sampling_fields_mean_the_same_on_every_route(gateway, engines, field):
    engine = engines.engines[0]
    sent = {}
    for path in GENERATION:
        name = "stop_sequences" if (path, field) == ("/v1/messages", "stop") else field
        engine.received.clear()
        fixed = {"seed": 1} if field != "seed" else {}
        status, _, error = await post(gateway, path, **fixed, **{name: SERVED_EVERYWHERE.get(field, ["x"])})
        assert status == 200, (path, error)
        sent[path] = engine.received[-1].sampling
        engine.received.clear()
        await post(gateway, path, **fixed)
        assert engine.received[-1].sampling != sent[path], path
    assert len({msgspec.json.encode(sampling) for sampling in sent.values()}) == 1


async def test_shared_fields_are_on_every_generation_route():
    for path in GENERATION:
        assert set(SharedFields.__struct_fields__) <= set(ROUTES[path][0].__struct_fields__)


@pytest.mark.parametrize("path", GENERATION)
async def test_no_stop_trim_keeps_the_stop_text(gateway, path):
    stop = "stop_sequences" if path == "/v1/messages" else "stop"
    tokens = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    texts = {}
    for trim in (False, True):
        fields = {tokens: 40, "seed": 1, "ignore_eos": True, stop: ["e", "a", "o", "i"], "no_stop_trim": not trim}
        body = {"model": "mock", **ROUTES[path][1], **fields}
        texts[trim] = (await gateway.http.post(path, json=body)).text
    assert texts[True] != texts[False]


@pytest.mark.parametrize("path", ROUTES)
async def test_rid_names_the_request(gateway, path):
    answer = await gateway.http.post(path, json={"model": "mock", **ROUTES[path][1], "rid": "mine"})
    assert answer.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("path", ROUTES)
async def test_missing_model_is_the_only_one(gateway, path):
    body = ROUTES[path][1]
    for fields in ({}, {"model": None}, {"model": ""}):
        answer = await gateway.http.post(path, json={**body, **fields})
        assert (answer.status_code, answer.json()["model"]) == (200, "mock"), answer.text
