"""Answers of `POST /v1/responses`: response objects and the items of their output."""

from typing import Any, Literal

import msgspec

from tandem_services.gateway.openai_schemas import ReasoningEffort
from tandem_services.gateway.responses.schemas import FunctionTool, ResponsesToolChoice

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
