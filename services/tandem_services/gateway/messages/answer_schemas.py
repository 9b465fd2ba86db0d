"""Answers of `POST /v1/messages`: message objects, the blocks of their content, errors."""

from typing import Any, Literal

import msgspec


class AnsweredText(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class AnsweredThinking(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class AnsweredToolUse(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ThinkingTokens(msgspec.Struct, kw_only=True):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """`input_tokens` are those that were not in a cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessageObject(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """What `MessagesFormat` writes, which a test holds to it."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[AnsweredText | AnsweredThinking | AnsweredToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "tool_use", "stop_sequence"] | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(msgspec.Struct, kw_only=True):
    """One event of a stream. What else it has goes by its type, as with Anthropic."""

    type: str


class MessagesModel(msgspec.Struct, kw_only=True, tag_field="type", tag="model"):
    """A model as Anthropic lists it."""

    id: str
    display_name: str
    created_at: str
    """RFC 3339."""


class MessagesModelList(msgspec.Struct, kw_only=True):
    data: list[MessagesModel]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None


class CountedTokens(msgspec.Struct, kw_only=True):
    input_tokens: int


class MessageErrorBody(msgspec.Struct, kw_only=True):
    type: str
    message: str


class MessageError(msgspec.Struct, kw_only=True, tag_field="type", tag="error"):
    error: MessageErrorBody
    request_id: str
