"""Every spelling of a grammar becomes the same specification, or a 400 that names the field."""

import json

import msgspec
import pytest

from tandem_engine.messages.grammar import GrammarKind, GrammarSpec
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.messages.sampling import SamplingParams
from tandem_services.common.errors import ApiError
from tandem_services.gateway.api.openai_schemas import GenerationFields
from tandem_services.gateway.output.choice_text import ChoiceFinish, ChoiceText
from tandem_services.gateway.output.structured_output import requested_grammar
from tandem_services.gateway.output.token_sequence import Accepted
from tandem_testing.gateway_builders import EngineRack, live_gateway
from tandem_testing.mock_engine import MockBehavior, hash_tokens

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":"))
TAGS = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}
TAGS_TEXT = json.dumps(TAGS, separators=(",", ":"))


def asked(**fields: object):
    body = json.dumps(fields).encode()
    request = msgspec.json.decode(body, type=GenerationFields)
    grammar = requested_grammar(request, request.response_format)
    return None if grammar is None else grammar.spec


def spec(kind: GrammarKind, source: str = "", **options: object) -> GrammarSpec:
    return GrammarSpec(kind=kind, source=source, **options)


def schema_format(**named: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "x", **named}}


GOOD = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, spec(GrammarKind.JSON_OBJECT)),
    ({"response_format": schema_format(schema=SCHEMA)}, spec(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT)),
    ({"response_format": schema_format(schema=SCHEMA, strict=True)}, spec(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT)),
    (
        {"response_format": schema_format(schema=SCHEMA, strict=False)},
        spec(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT, lenient=True),
    ),
    ({"response_format": {"type": "structural_tag", **TAGS}}, spec(GrammarKind.STRUCTURAL_TAG, TAGS_TEXT)),
    ({"structured_outputs": {"json": SCHEMA}}, spec(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT)),
    ({"structured_outputs": {"json": SCHEMA_TEXT}}, spec(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT)),
    ({"structured_outputs": {"regex": "a+"}}, spec(GrammarKind.REGEX, "a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, spec(GrammarKind.CHOICE, '["a","b"]')),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, spec(GrammarKind.EBNF, 'root ::= "a"')),
    ({"structured_outputs": {"json_object": True}}, spec(GrammarKind.JSON_OBJECT)),
    ({"structured_outputs": {"structural_tag": TAGS_TEXT}}, spec(GrammarKind.STRUCTURAL_TAG, TAGS_TEXT)),
    (
        {"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
        spec(GrammarKind.JSON_OBJECT, whitespace_pattern=" ?"),
    ),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        spec(GrammarKind.JSON_OBJECT, whitespace_pattern=""),
    ),
    ({"guided_json": SCHEMA}, spec(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT)),
    ({"guided_regex": "a+"}, spec(GrammarKind.REGEX, "a+")),
    ({"guided_choice": ["a"]}, spec(GrammarKind.CHOICE, '["a"]')),
    ({"guided_grammar": 'root ::= "a"'}, spec(GrammarKind.EBNF, 'root ::= "a"')),
    ({"regex": "a+"}, spec(GrammarKind.REGEX, "a+")),
    ({"ebnf": 'root ::= "a"'}, spec(GrammarKind.EBNF, 'root ::= "a"')),
    ({"json_schema": SCHEMA_TEXT}, spec(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT)),
]


@pytest.mark.parametrize(("fields", "expected"), GOOD, ids=lambda value: json.dumps(value, default=str)[:60])
def test_each_spelling_is_understood(fields, expected):
    assert asked(**fields) == expected


def test_properties_keep_their_order():
    grammar = asked(guided_json=SCHEMA)
    assert [*json.loads(grammar.source)["properties"]] == ["b", "a"]


DEEP = {}
for _ in range(40):
    DEEP = {"items": DEEP}

BAD = [
    ({"response_format": schema_format()}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}}, "response_format"),
    ({"response_format": schema_format(schema=DEEP)}, "response_format"),
    ({"response_format": schema_format(schema={"enum": ["x" * 100] * 1000})}, "response_format"),
    ({"response_format": {"type": "structural_tag", "triggers": ["<"]}}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["a"] * 257}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["a" * 1025]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a" * 5000}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": ""}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "x" * 9000}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": True, "whitespace_pattern": " " * 300}}, "structured_outputs"),
    ({"guided_json": "5"}, "guided_json"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"json_schema": '"x"'}, "json_schema"),
]


@pytest.mark.parametrize(("fields", "field"), BAD, ids=lambda value: json.dumps(value, default=str)[:60])
def test_malformed_constraint_is_rejected_by_name(fields, field):  # [structured-output]
    with pytest.raises(ApiError) as refusal:
        asked(**fields)
    assert (refusal.value.status, refusal.value.param) == (400, field)


@pytest.fixture
def rack():
    with EngineRack() as engines:
        engines.add("solo", MockBehavior(token=hash_tokens(3, 250)))
        yield engines


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": schema_format(schema=True)}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"choices": ["a"]}}, "structured_outputs.choices"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.format"),
        ({"guided_choice": "a"}, "guided_choice"),
    ],
)
async def test_wrong_types_are_refused_with_their_path(rack, tokenizer, fields, param):
    async with live_gateway(rack.context, tokenizer, rack.engines) as gateway:
        answer = await gateway.chat(max_tokens=2, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_grammar_reaches_every_worker_of_every_choice(rack, tokenizer):
    async with live_gateway(rack.context, tokenizer, rack.engines) as gateway:
        answer = await gateway.complete(max_tokens=2, n=2, guided_regex="a+")
    assert answer.status_code == 200
    received = rack.engines[0].received
    assert [request.sampling.grammar for request in received] == [spec(GrammarKind.REGEX, "a+")] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [({"guided_regex": "("}, "guided_regex"), ({"response_format": {"type": "json_object"}}, "response_format")],
)
async def test_engine_rejection_is_a_400_with_the_client_field(tokenizer, fields, param, stream):
    refusal = Finish(reason=FinishReason.ERROR, error="this grammar is wrong", code="invalid_request", param="grammar")
    behavior = MockBehavior(token=hash_tokens(3, 250), refuse=refusal)
    with EngineRack() as engines:
        engines.add("solo", behavior)
        async with live_gateway(engines.context, tokenizer, engines.engines) as gateway:
            answer = await gateway.chat(max_tokens=2, stream=stream, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["message"] == "this grammar is wrong"


@pytest.mark.parametrize(("by_grammar", "shown"), [(True, "a b"), (False, "a ")])
def test_last_token_is_text_for_grammar_end_but_not_for_stop(tokenizer, by_grammar, shown):
    ids = [*tokenizer.encode("a "), *tokenizer.encode("b")]
    text = ChoiceText(0, tokenizer.vocabulary, SamplingParams(max_tokens=9), skip_special_tokens=True, keep_stop=False)
    piece = text.absorb(Accepted(ids, [], Finish(reason=FinishReason.STOP, by_grammar=by_grammar)))
    assert (piece.text, piece.tokens, piece.finish) == (shown, len(ids), ChoiceFinish("stop", None))
