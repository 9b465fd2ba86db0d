"""JSON schemas of what the gateway decodes and encodes, made by msgspec from the structs themselves.

Requests and answers are apart: a field with a default may be left out of a request, while an answer always has it. A
struct of both gets a second name for its answers where that makes a difference.

What is asked of a request beyond the types of its fields, as its schema says it.

Types come from the structs, refused fields and their neutral values from the tables that refuse them. What a field must
be that functions check (`REQUIRED`, `BOUNDS`) is written down here again; `test_openapi_narrowing` asks a gateway for
every line of it.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from tandem_engine.messages.requests import MAX_SESSION_BYTES
from tandem_engine.messages.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BUDGET,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
)
from tandem_services.gateway.api.anthropic.schemas import MessagesRequest
from tandem_services.gateway.api.embeddings import EmbeddingRequest
from tandem_services.gateway.api.openai_schemas import ChatRequest, CompletionRequest
from tandem_services.gateway.api.responses.schemas import ResponsesRequest
from tandem_services.gateway.api.sessions import CloseRequest, OpenRequest
from tandem_services.gateway.http.known_fields import neutral_values
from tandem_services.gateway.http.known_fields import refused_fields as fields_refused_by
from tandem_services.gateway.limits import (
    MAX_CACHE_SALT_CHARACTERS,
    MAX_CHAT_TOP_LOGPROBS,
    MAX_CHOICES,
    MAX_COMPLETION_LOGPROBS,
    MAX_DIMENSIONS,
    MAX_MESSAGES,
    MAX_METADATA_ENTRIES,
    MAX_OUTPUT_TOKENS,
    MAX_USER_CHARACTERS,
)
from tandem_services.gateway.models.prompts import MAX_WORDS
from tandem_services.gateway.output.tools import MAX_TOOLS

Schema = dict[str, Any]
Shape = type[msgspec.Struct]

REQUIRED: Mapping[Shape, tuple[str, ...]] = {
    ChatRequest: ("messages",),
    CompletionRequest: ("prompt",),
    ResponsesRequest: ("input",),
    EmbeddingRequest: ("input",),
    MessagesRequest: ("messages",),
}
"""Fields that structs let be absent, so that who leaves one out is told so in the gateway's own words."""

_INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}

_COMMON: Mapping[str, Schema] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "seed": _INT64,
    "priority": _INT64,
    "timeout": {"exclusiveMinimum": 0},
    "cache_salt": {"minLength": 1, "maxLength": MAX_CACHE_SALT_CHARACTERS},
    "user": {"maxLength": MAX_USER_CHARACTERS},
    "metadata": {"maxProperties": MAX_METADATA_ENTRIES},
}

_AFFINITY: Mapping[str, Schema] = {
    name: {"maxLength": MAX_USER_CHARACTERS} for name in ("prompt_cache_key", "session_id")
}
_TRUNCATION: Schema = {"minimum": -1}

_SHARED: Mapping[str, Schema] = {
    **{name: bounds for name, bounds in _COMMON.items() if name not in ("user", "metadata")},
    **_AFFINITY,
    "min_tokens": {"minimum": 0},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 2},
    "logit_bias": {"maxProperties": MAX_LOGIT_BIASES},
    "allowed_token_ids": {"minItems": 1, "maxItems": MAX_ALLOWED_TOKEN_IDS},
    "bad_words": {"maxItems": MAX_WORDS},
    "truncate_prompt_tokens": _TRUNCATION,
    "stream_interval": {"minimum": 1, "maximum": MAX_OUTPUT_TOKENS},
    "stop_token_ids": {"maxItems": MAX_STOP_TOKEN_IDS},
}

_GENERATION: Mapping[str, Schema] = {
    **_SHARED,
    "user": _COMMON["user"],
    "metadata": _COMMON["metadata"],
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "best_of": {"minimum": 1, "maximum": MAX_CHOICES},
    "prompt_logprobs": {"minimum": 0, "maximum": MAX_TOP_LOGPROBS},
    "logprob_start": {"minimum": 0},
    "logprob_token_ids": {"minItems": 1, "maxItems": MAX_LOGPROB_TOKEN_IDS},
    "stop": {"maxItems": MAX_STOP_STRINGS},
}
_SESSION_ID: Schema = {"minLength": 1, "maxLength": MAX_SESSION_BYTES}
_OUTPUT_TOKENS: Schema = {"minimum": 1, "maximum": MAX_OUTPUT_TOKENS}

BOUNDS: Mapping[Shape, Mapping[str, Schema]] = {
    ChatRequest: {
        **_GENERATION,
        "messages": {"maxItems": MAX_MESSAGES},
        "max_tokens": {**_OUTPUT_TOKENS, "minimum": 0},
        "max_completion_tokens": {**_OUTPUT_TOKENS, "minimum": 0},
        "top_logprobs": {"minimum": 0, "maximum": MAX_CHAT_TOP_LOGPROBS},
        "thinking_token_budget": {"minimum": 0, "maximum": MAX_BUDGET},
        "tools": {"maxItems": MAX_TOOLS},
    },
    CompletionRequest: {
        **_GENERATION,
        "max_tokens": {**_OUTPUT_TOKENS, "minimum": 0},
        "logprobs": {"minimum": 0, "maximum": MAX_COMPLETION_LOGPROBS},
    },
    ResponsesRequest: {
        **_SHARED,
        "user": _COMMON["user"],
        "metadata": _COMMON["metadata"],
        "stop": {"maxItems": MAX_STOP_STRINGS},
        "max_output_tokens": _OUTPUT_TOKENS,
        "tools": {"maxItems": MAX_TOOLS},
    },
    MessagesRequest: {
        **_SHARED,
        "stop_sequences": {"maxItems": MAX_STOP_STRINGS},
        "messages": {"maxItems": MAX_MESSAGES},
        "max_tokens": _OUTPUT_TOKENS,
        "tools": {"maxItems": MAX_TOOLS},
    },
    EmbeddingRequest: {
        "dimensions": {"minimum": 1, "maximum": MAX_DIMENSIONS},
        "truncate_prompt_tokens": _TRUNCATION,
        **{field: _COMMON[field] for field in ("user", "cache_salt", "priority", "timeout")},
    },
    OpenRequest: {"session_id": _SESSION_ID, "cache_salt": _COMMON["cache_salt"]},
    CloseRequest: {"session_id": _SESSION_ID, "cache_salt": _COMMON["cache_salt"]},
}
"""What a value of a field's type must be besides. Bounds that hang together with other fields are not among them."""

NEVER_STRICT: tuple[Shape, ...] = (OpenRequest, CloseRequest)


def narrowed(shape: Shape, schema: Schema, *, strict: bool) -> Schema:
    """The schema of a request as a whole; `strict`: fields that it does not name are refused."""
    properties = dict(schema["properties"])
    for field, bounds in BOUNDS.get(shape, {}).items():
        properties[field] = _bounded(properties[field], bounds)
    for field, values in refused_fields(shape).items():
        properties[field] = {
            "enum": [None, *values],
            "description": "Not supported here. These values ask for nothing and are accepted.",
        }
    required = REQUIRED.get(shape, ())
    for field in required:
        properties[field] = _present(properties[field])
    closing = {"additionalProperties": False} if strict and shape not in NEVER_STRICT else {}
    return {**schema, "properties": properties, "required": [*schema["required"], *required], **closing}


def refused_fields(shape: Shape) -> Mapping[str, tuple[Any, ...]]:
    """Known fields that are not served, and their values, beside null, that ask for nothing."""
    if shape not in REQUIRED:
        return {}
    return {field: neutral_values(field) for field in fields_refused_by(shape)}


def _bounded(schema: Schema, bounds: Schema) -> Schema:
    """Bounds go to the options that are of their kind: those of a list say nothing about a text."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [_bounded(option, bounds) for option in schema["anyOf"]]}
    return {**schema, **bounds} if schema.get("type") in _KINDS[next(iter(bounds))] else schema


_KINDS = {
    "minimum": ("integer", "number"),
    "exclusiveMinimum": ("integer", "number"),
    "minLength": ("string",),
    "maxLength": ("string",),
    "minItems": ("array",),
    "maxItems": ("array",),
    "maxProperties": ("object",),
}


def _present(schema: Schema) -> Schema:
    """Without null and without a default."""
    options = [option for option in schema["anyOf"] if option != {"type": "null"}]
    return options[0] if len(options) == 1 else {"anyOf": options}


PLACE = "#/components/schemas/"


class Components:
    """`schemas` is the document's part; `request` and `answer` refer to it."""

    def __init__(self, requests: Iterable[type[msgspec.Struct]], answers: Iterable[Any], *, strict: bool) -> None:
        self._requests = _by_type(requests)
        self._answers = _by_type(answers)
        structs = {struct.__name__: struct for struct in _structs(self._answers)}
        of_requests = _schemas(self._requests)
        of_answers = {name: _answered(schema, structs.get(name)) for name, schema in _schemas(self._answers).items()}
        both = {name for name in of_requests.keys() & of_answers.keys() if of_requests[name] != of_answers[name]}
        self._renamed = {PLACE + name: f"{PLACE}{name}Output" for name in both}
        for shape in self._requests:
            of_requests[shape.__name__] = narrowed(shape, of_requests[shape.__name__], strict=strict)
        self.schemas: dict[str, Schema] = dict(of_requests)
        for name, schema in of_answers.items():
            self.schemas[f"{name}Output" if name in both else name] = self._output(schema)

    def request(self, shape: type[msgspec.Struct]) -> Schema:
        return self._requests[shape]

    def answer(self, shape: Any) -> Schema:
        schema: Schema = self._output(self._answers[shape])
        return schema

    def _output(self, schema: Any) -> Any:
        """With the names that structs have in answers."""
        match schema:
            case dict():
                return {key: self._output(value) for key, value in schema.items()}
            case list():
                return [self._output(value) for value in schema]
            case str():
                return self._renamed.get(schema, schema)
        return schema


def _by_type(types: Iterable[Any]) -> dict[Any, Schema]:
    wanted = list(dict.fromkeys(types))
    return dict(zip(wanted, msgspec.json.schema_components(wanted, ref_template=PLACE + "{name}")[0], strict=True))


def _schemas(types: Mapping[Any, Schema]) -> dict[str, Schema]:
    return msgspec.json.schema_components(types, ref_template=PLACE + "{name}")[1]


def _answered(schema: Schema, struct: type[msgspec.Struct] | None) -> Schema:
    """As it is written: with every field but those that may be unset."""
    if "properties" not in schema:
        return schema
    properties = {name: _without_default(value) for name, value in schema["properties"].items()}
    required = schema["required"] if struct is None else [*_always_written(struct)]
    return {**schema, "properties": properties, "required": required}


def _without_default(schema: Schema) -> Schema:
    return {key: value for key, value in schema.items() if key != "default"}


def _always_written(struct: type[msgspec.Struct]) -> Iterator[str]:
    config = struct.__struct_config__
    if config.tag_field is not None:
        yield config.tag_field
    for field in msgspec.structs.fields(struct):
        may_be_left_out = field.default is msgspec.UNSET or (config.omit_defaults and not field.required)
        if not may_be_left_out:
            yield field.encode_name


def _structs(types: Iterable[Any]) -> set[type[msgspec.Struct]]:
    """All structs that these types are made of."""
    found: set[type[msgspec.Struct]] = set()
    waiting = list(msgspec.inspect.multi_type_info(types))
    while waiting:
        info = waiting.pop()
        if isinstance(info, msgspec.inspect.StructType):
            if info.cls in found:
                continue
            found.add(info.cls)
        waiting += _parts(info)
    return found


def _parts(info: msgspec.inspect.Type) -> Iterator[msgspec.inspect.Type]:
    match info:
        case msgspec.inspect.StructType() | msgspec.inspect.DataclassType():
            yield from (field.type for field in info.fields)
        case msgspec.inspect.UnionType():
            yield from info.types
        case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType():
            yield info.item_type
        case msgspec.inspect.DictType():
            yield info.value_type
