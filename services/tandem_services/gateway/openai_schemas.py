"""OpenAI's request and response bodies, as far as they are served.

Requests are decoded strictly: a wrong type is a 400 naming the field. Null means absent. Unknown fields
are ignored, and of two equal keys the last one wins. Responses always carry the fields that OpenAI's
specification requires, null included.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tandem_engine.tokenizer.truncation import TruncationSide
from tandem_services.gateway.prompt_shapes import PromptItem
from tandem_services.gateway.session_turns import SessionParams
from tandem_services.gateway.structured_output import StructuredOutputFields
from tandem_services.gateway.tools import Tool, ToolChoice


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(StructuredOutputFields, kw_only=True):
    """What chat and completions have in common."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    """Tokens whose logprobs are told instead of those of the likeliest."""
    logprob_start: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    """Tokens of a choice that are written together."""
    echo: bool | None = None
    truncate_prompt_tokens: int | None = None
    """Tokens that stay of a longer prompt; -1 for as many as there is room for."""
    truncation_side: TruncationSide | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Logprobs call tokens `token_id:5`."""
    cache_salt: str | None = None
    session_params: SessionParams | None = None
    """The prompt is the next turn of a session; see docs/features.md."""
    priority: int | None = None
    """Greater is more important; see docs/scheduling.md."""
    timeout: float | None = None
    """Seconds until the answer must be there; see docs/limits.md."""
    user: str | None = None
    prompt_cache_key: str | None = None
    """Requests that say the same are likely to begin alike; see `affinity_key`."""
    session_id: str | None = None
    """The same, of one conversation."""
    request_id: str | None = None
    """What the client calls the request where its X-Request-Id does not say it."""
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    verbosity: str | None = None
    """These change nothing in an answer here. They are known so that strict gateways take them."""


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class CalledTool(msgspec.Struct, kw_only=True):
    """A finished tool call, in answers and in the messages of later requests."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's newer name of the same."""


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ChatTemplateVariables(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The variables of a chat template that a client may set."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class ChatRequest(GenerationFields, kw_only=True):
    messages: list[ChatMessage] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: ChatTemplateVariables | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    """Most tokens of reasoning; then the answer is made to begin."""
    continue_final_message: bool | None = None
    """The last message is the beginning of the answer."""
    documents: list[dict[str, str]] | None = None
    reasoning_effort: ReasoningEffort | None = None
    """For chat templates that have a place for them, as `documents`."""


class CompletionRequest(GenerationFields, kw_only=True):
    prompt: str | list[PromptItem] | None = None
    logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    include_reasoning: Any = None
    thinking_token_budget: Any = None
    continue_final_message: Any = None
    documents: Any = None
    reasoning_effort: Any = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, str]] | None = None
    reasoning_effort: ReasoningEffort | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: ChatTemplateVariables | None = None
    tools: list[Tool] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


class TokenizeResponse(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    prompt: str


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = msgspec.field(default_factory=CompletionTokensDetails)


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    """None for the first token of an echoed prompt, which nothing predicts."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptTokenLogprob(msgspec.Struct, kw_only=True):
    """vLLM's, of one token that could stand at a position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptTokenLogprob] | None]
"""Per prompt token, by token id; None where nothing was asked for or nothing predicts it."""


class AssistantMessage(msgspec.Struct, kw_only=True):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class CallDelta(msgspec.Struct, kw_only=True):
    """The beginning of a tool call, with id, type and name, or a piece of its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    """With the first chunk of a choice."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A finished choice, or one piece of it in a stream (`finish_reason` null until the last)."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    """In a stream with the first piece."""
    token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """Whole answers and stream chunks have the same shape and the same `object`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    root: str
    max_model_len: int | None
    owned_by: str = "tandem"
    parent: None = None


class ModelList(msgspec.Struct, kw_only=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class ErrorBody(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct, kw_only=True):
    error: ErrorBody
