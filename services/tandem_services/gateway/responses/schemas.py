"""Bodies of `POST /v1/responses`, as far as they are served: a stateless subset of OpenAI's.

What would change the answer and is not served is refused by name (`request_fields`); unknown fields are ignored.
"""

from typing import Any, Literal

import msgspec

from tandem_services.gateway.openai_schemas import ReasoningEffort, SharedFields, TemplateVariables


class TextPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """A message, a call of the model's, its output, or reasoning, by `type`."""

    type: str = "message"
    role: str | None = None
    content: str | list[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[TextPart] | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """Chat's, without its inner object."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    name: str


class AllowedFunctions(msgspec.Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """Some of the tools, of which the model may call (`auto`) or must call one."""

    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


ResponsesToolChoice = Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions


class TextFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: ReasoningEffort | None = None
    """For chat templates that have a place for it."""
    max_tokens: int | None = None
    """OpenRouter's: a chat's `thinking_token_budget`."""


class ResponsesRequest(SharedFields, kw_only=True):
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stop: str | list[str] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    stream_options: Any = None
    """What is in a stream is not for the client to choose: there is nothing to obfuscate or to leave out."""
    include_reasoning: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    reasoning: ReasoningOptions | None = None


INCLUDABLE = ("reasoning.encrypted_content",)
"""What needs nothing done: reasoning is answered in plain text, and taken back so."""
