"""OpenAI's request bodies, as far as they are served. Those of responses are in `openai_answers`.

Requests are decoded strictly: a wrong type is a 400 naming the field. Null means absent. Unknown fields
are ignored, and of two equal keys the last one wins.
"""

from typing import Any, Literal

import msgspec

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
    suffix: str | None = None
    """The answer goes between the prompt and this."""
    parse_special_tokens: bool | None = None
    """Special tokens in text prompts become control tokens (default); otherwise they are plain text."""
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
    parse_special_tokens: bool | None = None
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
