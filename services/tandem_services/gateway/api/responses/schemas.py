"""Bodies of `POST /v1/responses`: the stateless subset of OpenAI's Responses API that is served.

Fields that would change the answer and are not served are rejected by name (`known_fields`). Unknown fields of the body
are ignored.
"""

from typing import Any, Literal

import msgspec

from tandem_services.gateway.api.openai_schemas import ReasoningEffort, SharedFields, TemplateVariables
from tandem_services.gateway.http.known_fields import Refused


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    annotations: Any = None
    logprobs: Any = None
    parsed: Any = None
    prompt_cache_breakpoint: Any = None
    # What parts of other types have. `conversation` refuses them with a sentence about the type.
    image_url: Any = None
    detail: Any = None
    file_id: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    input_audio: Any = None
    refusal: Any = None


OTHER_PARTS = ("image_url", "detail", "file_id", "file_data", "file_url", "filename", "input_audio", "refusal")
"""Fields of parts that are no text."""


class InputItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message, a call of the model's, its output, or reasoning, by `type`."""

    type: str = "message"
    role: str | None = None
    content: str | list[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[TextPart] | None = None
    id: Any = None
    status: Any = None
    summary: Any = None
    phase: Any = None
    caller: Any = None
    created_by: Any = None
    parsed_arguments: Any = None
    encrypted_content: Refused = None
    namespace: Refused = None
    runs_async: Refused = msgspec.field(name="async", default=None)
    async_: Refused = None
    """As OpenAI's client writes `async` of an answer that is sent back."""


class FunctionTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Chat's, without its inner object."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = None
    output_schema: Any = None
    allowed_callers: Refused = None
    defer_loading: Refused = None
    runs_async: Refused = msgspec.field(name="async", default=None)


class NamedFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    name: str


class AllowedFunctions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """Some of the tools, of which the model may call (`auto`) or must call one."""

    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


ResponsesToolChoice = Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Any = None


class ReasoningOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: ReasoningEffort | None = None
    """For chat templates that have a place for it."""
    max_tokens: int | None = None
    """OpenRouter's: a chat's `thinking_token_budget`."""
    summary: Any = None
    generate_summary: Any = None
    context: Refused = None
    mode: Refused = None


class ResponsesStreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What is in a stream is not for the client to choose: there is nothing to obfuscate or to leave out."""

    include_obfuscation: Any = None
    include_usage: Any = None
    continuous_usage_stats: Any = None


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
    stream_options: ResponsesStreamOptions | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    reasoning: ReasoningOptions | None = None


INCLUDABLE = ("reasoning.encrypted_content",)
"""What needs nothing done: reasoning is answered in plain text, and taken back so."""


ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningText]


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, kw_only=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class AnsweredTextFormat(msgspec.Struct, kw_only=True):
    format: dict[str, Any]
    """The request's, without what it left out."""


class AnsweredReasoning(msgspec.Struct, kw_only=True):
    effort: ReasoningEffort | None = None
    summary: None = None


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response, whole or as far as it has come. From `instructions` on it repeats its request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    store: Literal[False] = False
    background: Literal[False] = False
    previous_response_id: None = None
    max_tool_calls: None = None
    prompt: None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    top_logprobs: Literal[0] = 0
    truncation: Literal["disabled"] = "disabled"
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    text: AnsweredTextFormat
    tool_choice: ResponsesToolChoice
    tools: list[FunctionTool]
    user: str | None
    reasoning: AnsweredReasoning


class ResponseEvent(msgspec.Struct, kw_only=True):
    """One event of a stream. What else it has goes by its type, as with OpenAI."""

    type: str
    sequence_number: int
