"""Fields of the objects within request bodies: a closed world, as `request_fields` is for the bodies themselves.

    served           the object's struct has the field
    without effect   the struct has it, and its value changes nothing here (`NESTED_WITHOUT_EFFECT`)
    refused          the struct has it with the type `Refused`: null is taken, any other value is a 400 with its path
    unknown          a 400 with its path: structs within a body are declared with `forbid_unknown_fields`

A field within an object says what the object means, so that one that is not read could change the answer.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import msgspec
from msgspec import inspect

from tandem_engine.logs import quoted
from tandem_services.common.errors import ApiError, bad_request

Refused: TypeAlias = None
"""Type of a known field that no route serves."""

_CACHED = "prefixes are always cached"
_IDS = "the client's name of it"
_READ_BY_CLIENTS = "what a client has read from the text"
NESTED_WITHOUT_EFFECT: Mapping[str, str] = {
    "Block.cache_control": _CACHED,
    "Block.caller": "the client has run the tool",
    "Block.citations": "they are about the text, which is read",
    "Block.parsed_output": _READ_BY_CLIENTS,
    "Block.signature": "reasoning is taken back without proof",
    "ChatMessage.annotations": "they are about the text, which is read",
    "ChatMessage.cache_control": _CACHED,
    "ChatMessage.parsed": _READ_BY_CLIENTS,
    "ChatMessage.provider_specific_fields": "LiteLLM's notes about an answer",
    "ContentPart.cache_control": _CACHED,
    "ContentPart.prompt_cache_breakpoint": _CACHED,
    "CustomTool.cache_control": _CACHED,
    "CustomTool.eager_input_streaming": "input is always streamed as it is written",
    "Function.cache_control": _CACHED,
    "FunctionTool.cache_control": _CACHED,
    "FunctionTool.output_schema": "for code that calls tools",
    "InputItem.caller": "the client has run the tool",
    "InputItem.created_by": _IDS,
    "InputItem.id": _IDS,
    "InputItem.parsed_arguments": _READ_BY_CLIENTS,
    "InputItem.phase": "for models of OpenAI's",
    "InputItem.status": "items are read as they are",
    "InputItem.summary": "the reasoning itself is read, from `content`",
    "OpenRequest.capacity_of_str_len": "pages are not set aside",
    "OpenRequest.rid": _IDS,
    "OpenRequest.streaming": "every conversation only grows",
    "CloseRequest.rid": _IDS,
    "ReasoningOptions.generate_summary": "reasoning is answered as it is",
    "ReasoningOptions.summary": "reasoning is answered as it is",
    "ResponsesStreamOptions.continuous_usage_stats": "vLLM's chats have it",
    "ResponsesStreamOptions.include_obfuscation": "there is nothing to obfuscate",
    "ResponsesStreamOptions.include_usage": "usage is in the last event",
    "SentCall.cache_control": _CACHED,
    "SentCall.index": "calls are read in their order",
    "SentFunction.parsed_arguments": _READ_BY_CLIENTS,
    "StreamOptions.include_obfuscation": "there is nothing to obfuscate",
    "TextBlock.cache_control": _CACHED,
    "TextBlock.citations": "they are about the text, which is read",
    "TextOptions.verbosity": "for models of OpenAI's",
    "TextPart.annotations": "they are about the text, which is read",
    "TextPart.logprobs": "they are about the text, which is read",
    "TextPart.parsed": _READ_BY_CLIENTS,
    "TextPart.prompt_cache_breakpoint": _CACHED,
    "Thinking.display": "thinking is answered as it is",
    "Tool.cache_control": _CACHED,
}
"""Why the value of a field changes nothing, by the name of the struct and of the field."""

_INSTEAD: Mapping[str, str] = {
    "audio": "there is no audio: send its transcript as content",
    "context_management": "a conversation is answered as it was sent",
    "encrypted_content": "encrypted reasoning cannot be read here: send its text as content, or leave the item out",
    "format": "use structures and triggers",
    "function_call": "use tool_calls",
    "offset": "a conversation only grows: send the whole conversation as a new session",
    "refusal": "send its text as content",
    "replace": "a conversation only grows: send the whole conversation as a new session",
    "timeout": "the server's --session-ttl applies to all sessions: leave it out",
}
"""What a client can do, where that is more than to leave the field out."""

_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`", re.DOTALL)
_REFUSED = "Expected `null`"
_STEP = re.compile(r"(\w+)|\[(\d+)\]")


class NestedObject(NamedTuple):
    """An object that a body may hold."""

    path: str
    """`messages[].content[]`; with the value of its tag where that decides: `tool_choice(function)`."""
    shape: type[msgspec.Struct]


def nested_refusal(detail: str, path: str, body: bytes) -> ApiError | None:
    """The error for a field of an object at `path`, from msgspec's sentence; None for one about something else."""
    unknown = _UNKNOWN.match(detail)
    if unknown:
        name = quoted(f"{path}.{unknown[1]}" if path else unknown[1])
        kind = _type_at(body, path)
        what = "" if kind is None else f" in an object of the type {quoted(kind)}"
        return bad_request(f"{name} is not a known field{what}; leave it out", name)
    if detail.startswith(_REFUSED):
        advice = _INSTEAD.get(path.rpartition(".")[2], "leave it out")
        return bad_request(f"{quoted(path)} is not supported here; {advice}", quoted(path))
    return None


def check_no_fields(part: msgspec.Struct, fields: Iterable[str], param: str) -> None:
    """Raise `ApiError` 400 for an object that has fields which belong to objects of other types."""
    for name in fields:
        if getattr(part, name) is not None:
            raise bad_request(
                f"{param}.{name} is not supported in an object of this type; leave it out", f"{param}.{name}"
            )


def nested_objects(shape: type[msgspec.Struct]) -> Iterator[NestedObject]:
    """Those of bodies of `shape`, without the body itself."""
    for field in shape_fields(shape):
        yield from _within(field.type, field.encode_name)


def shape_fields(shape: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    described = inspect.type_info(shape)
    assert isinstance(described, inspect.StructType)
    return described.fields


def is_refused(field: inspect.Field) -> bool:
    return isinstance(field.type, inspect.NoneType)


def _type_at(body: bytes, path: str) -> str | None:
    """`type` of the object at `path`, which may decide what its fields are."""
    here: Any = msgspec.json.decode(body)
    for name, index in _STEP.findall(path):
        try:
            here = here[int(index)] if index else here[name]
        except (LookupError, TypeError):
            return None
    kind = here.get("type") if isinstance(here, dict) else None
    return kind if isinstance(kind, str) else None


def _within(type_: inspect.Type, path: str) -> Iterator[NestedObject]:
    match type_:
        case inspect.UnionType(types=types):
            for each in types:
                yield from _within(each, path)
        case inspect.Metadata(type=inner):
            yield from _within(inner, path)
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            yield from _within(item, f"{path}[]")
        case inspect.DictType(value_type=value):
            yield from _within(value, f"{path}{{}}")
        case inspect.StructType(cls=cls, fields=fields, tag=tag):
            place = path if tag is None else f"{path}({tag})"
            yield NestedObject(place, cls)
            for field in fields:
                yield from _within(field.type, f"{place}.{field.encode_name}")
