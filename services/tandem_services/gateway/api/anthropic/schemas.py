"""Bodies of `POST /v1/messages`, requests and responses: the stateless part of Anthropic's Messages API that is served.

Fields that would change the answer and are not served are rejected by name (`known_fields`). Unknown fields of the body
are ignored.
"""

from typing import Any, Literal

import msgspec

from tandem_services.gateway.api.openai_schemas import SharedFields, TemplateVariables
from tandem_services.gateway.http.known_fields import Refused


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


class TextBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Of a system prompt or a tool's result."""

    type: str
    text: str | None = None
    cache_control: Any = None
    citations: Any = None
    # What blocks of other types have. `conversation` refuses them with a sentence about the type.
    source: Any = None
    title: Any = None
    context: Any = None
    tool_name: Any = None


class Block(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Part of a message: text, thinking, tool_use or tool_result, by `type`."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: Any = None
    citations: Any = None
    parsed_output: Any = None
    signature: Any = None
    caller: Any = None
    toolset_name: Refused = None
    # What blocks of other types have. `conversation` refuses them with a sentence about the type.
    source: Any = None
    title: Any = None
    context: Any = None
    data: Any = None
    transformations: Any = None


OTHER_TEXT_BLOCKS = ("source", "title", "context", "tool_name")

OTHER_BLOCKS = ("source", "title", "context", "data", "transformations")
"""Fields of blocks of other types, such as images and documents, which the structs have to refuse them."""


class InputMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class CustomTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that the client runs. Others have a `type` of their own."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None
    allowed_callers: Refused = None
    defer_loading: Refused = None
    input_examples: Refused = None


class Choice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`budget_tokens` is a chat's `thinking_token_budget` where the model reasons, and nothing to any other."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Any = None


class OutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: OutputFormat | None = None
    effort: str | None = None


class Metadata(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    user_id: str | None = None


class MessagesRequest(SharedFields, kw_only=True):
    """Also the body of `/v1/messages/count_tokens`, which needs no `max_tokens`."""

    messages: list[InputMessage] | None = None
    max_tokens: int | None = None
    system: str | list[TextBlock] | None = None
    stop_sequences: list[str] | None = None
    tools: list[CustomTool] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None
    user_profile_id: Any = None
    workspace_id: Any = None
    chat_template_kwargs: TemplateVariables | None = None
