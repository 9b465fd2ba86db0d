"""Converts all request fields for structured output into one `GrammarSpec`.

    response_format                                       OpenAI; with structural_tag as in vLLM and SGLang
    structured_outputs {json, regex, choice, grammar, …}  vLLM
    guided_json, guided_regex, guided_choice, …           vLLM, older
    regex, ebnf, json_schema                              SGLang

A request may use one of them. Checks that need no compiler happen here: types, sizes, depth. The engine checks meaning
and cost of a grammar; its error then names the field that the client used.
"""

import re
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import msgspec

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.base.logs import quoted
from tandem_engine.messages.grammar import GrammarKind, GrammarSpec, check_choices, check_depth
from tandem_services.common.errors import ApiError, bad_request
from tandem_services.gateway.http.known_fields import Refused

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class NamedSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TagStructure(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One form of `structural_tag`."""

    begin: str
    schema: dict[str, Any]
    end: str = ""


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    structures: list[TagStructure] | None = None
    triggers: list[str] | None = None
    format: Refused = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Unknown fields are refused: one of them may be a constraint."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None


class GrammarFields(msgspec.Struct, kw_only=True):
    """vLLM's and SGLang's fields, which every generation route has."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None


_grammars = attrgetter(*GrammarFields.__struct_fields__)


class RequestedGrammar(NamedTuple):
    """A grammar, and the request field it came from."""

    field: str
    spec: GrammarSpec


def requested_grammar(fields: GrammarFields, response_format: ResponseFormat | None) -> RequestedGrammar | None:
    """What the output has to look like. Raises `ApiError` 400 naming the field."""
    if response_format is None and _grammars(fields).count(None) == len(GrammarFields.__struct_fields__):
        return None
    asked = [*_asked(fields, response_format)]
    if len(asked) > 1:
        names = ", ".join(dict.fromkeys(grammar.field for grammar in asked))
        raise bad_request(f"only one grammar is allowed, this request has {len(asked)} ({names})", asked[1].field)
    for field, spec in asked:
        _check(field, spec)
    return asked[0] if asked else None


def name_grammar_field(error: ApiError, field: str | None) -> None:
    """An engine's error about a grammar names `grammar`; the client used `field`."""
    if error.param == "grammar" and field is not None:
        error.param = field


def _asked(fields: GrammarFields, response_format: ResponseFormat | None) -> Iterator[RequestedGrammar]:
    if response_format is not None:
        yield from _of_response_format(response_format)
    if fields.structured_outputs is not None:
        yield from _of_structured_outputs(fields.structured_outputs)
    kinds: Mapping[str, tuple[GrammarKind, Any]] = {
        "guided_json": (GrammarKind.JSON_SCHEMA, fields.guided_json),
        "guided_regex": (GrammarKind.REGEX, fields.guided_regex),
        "guided_choice": (GrammarKind.CHOICE, fields.guided_choice),
        "guided_grammar": (GrammarKind.EBNF, fields.guided_grammar),
        "regex": (GrammarKind.REGEX, fields.regex),
        "ebnf": (GrammarKind.EBNF, fields.ebnf),
        "json_schema": (GrammarKind.JSON_SCHEMA, fields.json_schema),
    }
    for field, (kind, value) in kinds.items():
        if value is not None:
            yield _grammar(field, kind, value, whitespace=fields.guided_whitespace_pattern)


def _of_response_format(wanted: ResponseFormat) -> Iterator[RequestedGrammar]:
    field = "response_format"
    match wanted.type:
        case "json_object":
            yield RequestedGrammar(field, GrammarSpec(kind=GrammarKind.JSON_OBJECT))
        case "json_schema":
            yield _grammar(field, GrammarKind.JSON_SCHEMA, *_named_schema(wanted.json_schema))
        case "structural_tag":
            if wanted.structures is None or wanted.triggers is None:
                raise bad_request(
                    "response_format of type structural_tag needs structures and triggers; no other form is supported",
                    field,
                )
            tags = {"structures": wanted.structures, "triggers": wanted.triggers}
            yield _grammar(field, GrammarKind.STRUCTURAL_TAG, tags)


class _Schema(NamedTuple):
    value: dict[str, Any]
    whitespace: str | None
    lenient: bool


def _named_schema(named: NamedSchema | None) -> _Schema:
    if named is None or named.schema is None:
        raise bad_request("response_format of type json_schema needs json_schema.schema", "response_format")
    if not _NAME.fullmatch(named.name):
        raise bad_request(
            f"response_format.json_schema.name must have 1 to 64 letters, digits, _ or -, got {quoted(named.name)}",
            "response_format",
        )
    # OpenAI's default is not strict, but a keyword that is silently ignored is a wrong answer: only a plain no is one.
    return _Schema(named.schema, whitespace=None, lenient=named.strict is False)


def _of_structured_outputs(wanted: StructuredOutputs) -> Iterator[RequestedGrammar]:
    field = "structured_outputs"
    whitespace = "" if wanted.disable_any_whitespace else wanted.whitespace_pattern
    kinds: tuple[tuple[GrammarKind, Any], ...] = (
        (GrammarKind.JSON_SCHEMA, wanted.json),
        (GrammarKind.REGEX, wanted.regex),
        (GrammarKind.CHOICE, wanted.choice),
        (GrammarKind.EBNF, wanted.grammar),
        (GrammarKind.STRUCTURAL_TAG, wanted.structural_tag),
    )
    asked = [_grammar(field, kind, value, whitespace=whitespace) for kind, value in kinds if value is not None]
    if wanted.json_object:
        asked.append(RequestedGrammar(field, GrammarSpec(kind=GrammarKind.JSON_OBJECT, whitespace_pattern=whitespace)))
    if not asked:
        raise bad_request(
            "structured_outputs needs one of json, regex, choice, grammar, json_object and structural_tag", field
        )
    yield from asked


def _grammar(
    field: str, kind: GrammarKind, value: Any, whitespace: str | None = None, lenient: bool = False
) -> RequestedGrammar:
    source = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return RequestedGrammar(
        field, GrammarSpec(kind=kind, source=source, whitespace_pattern=whitespace, lenient=lenient)
    )


def _check(field: str, spec: GrammarSpec) -> None:
    try:
        spec.check()
        if spec.kind in _JSON_SOURCES:
            _check_document(spec, _decoded(field, spec))
    except InvalidRequestError as error:
        raise bad_request(f"{field}: {error}", field) from error


_JSON_SOURCES = (GrammarKind.JSON_SCHEMA, GrammarKind.CHOICE, GrammarKind.STRUCTURAL_TAG)


def _decoded(field: str, spec: GrammarSpec) -> Any:
    try:
        return msgspec.json.decode(spec.source)
    except msgspec.DecodeError as error:
        raise bad_request(f"{field} is not valid JSON: {error}", field) from error


def _check_document(spec: GrammarSpec, document: Any) -> None:
    check_depth(document)
    if spec.kind is GrammarKind.CHOICE:
        check_choices(document)
    elif not isinstance(document, dict):
        raise InvalidRequestError(f"a {spec.kind} must be a JSON object", param="grammar")
