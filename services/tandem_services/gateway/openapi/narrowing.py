"""What is asked of a request beyond the types of its fields, as its schema says it.

Types come from the structs, refused fields and their neutral values from the tables that refuse them. What a field must
be that functions check (`REQUIRED`, `BOUNDS`) is written down here again; `test_openapi_narrowing` asks a gateway for
every line of it.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from tandem_engine.messages.reasoning import MAX_BUDGET
from tandem_engine.messages.requests import MAX_SESSION_BYTES
from tandem_engine.messages.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
)
from tandem_services.gateway.embedding_schemas import EmbeddingRequest
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
from tandem_services.gateway.messages.schemas import MessagesRequest
from tandem_services.gateway.openai_schemas import ChatRequest, CompletionRequest
from tandem_services.gateway.request_fields import neutral_values
from tandem_services.gateway.request_fields import refused_fields as fields_refused_by
from tandem_services.gateway.responses.schemas import ResponsesRequest
from tandem_services.gateway.session_routes import CloseRequest, OpenRequest
from tandem_services.gateway.token_rules import MAX_WORDS
from tandem_services.gateway.tools import MAX_TOOLS

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
