"""OpenAI's request bodies, as far as they are served. Those of responses are in `openai_answers`.

Requests are decoded strictly: a wrong type is a 400 naming the field. Null means absent. Unknown fields of a body
are ignored, those of objects within it refused (`nested_fields`), and of two equal keys the last one wins.
"""

from typing import Any, Literal

import msgspec

from tandem_engine.tokenizer.truncation import TruncationSide
from tandem_services.gateway.nested_fields import Refused
from tandem_services.gateway.prompt_shapes import PromptItem
from tandem_services.gateway.session_turns import SessionParams
from tandem_services.gateway.structured_output import GrammarFields, ResponseFormat
from tandem_services.gateway.tools import Tool, ToolChoice


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """With vLLM's defaults."""

    include_usage: bool | msgspec.UnsetType | None = msgspec.UNSET
    """Options that do not have it ask for usage, `{}` too."""
    continuous_usage_stats: bool | None = None
    """Usage in every chunk; only with `include_usage`."""
    include_obfuscation: Any = None

    @property
    def asks_for_usage(self) -> bool:
        return self.include_usage is msgspec.UNSET or bool(self.include_usage)


class SharedFields(GrammarFields, kw_only=True):
    """What all generation routes have in common, with the same meaning. A route that plans a chat copies them."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    """SGLang's name for `include_stop_str_in_output`."""
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_interval: int | None = None
    """Tokens of a choice that are written together."""
    truncate_prompt_tokens: int | None = None
    """Tokens that stay of a longer prompt; -1 for as many as there is room for."""
    truncation_side: TruncationSide | None = None
    cache_salt: str | None = None
    priority: int | None = None
    """Greater is more important; see docs/scheduling.md."""
    timeout: float | None = None
    """Seconds until the answer must be there; see docs/limits.md."""
    prompt_cache_key: str | None = None
    """Requests that say the same are likely to begin alike; see `affinity_key`."""
    session_id: str | None = None
    """The same, of one conversation."""
    request_id: str | None = None
    """What the client calls the request where its X-Request-Id does not say it."""
    rid: str | None = None
    """SGLang's name for `request_id`."""
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    cache_control: Any = None
    custom_labels: Any = None
    images_config: Any = None
    max_dynamic_patch: Any = None
    media_io_kwargs: Any = None
    min_dynamic_patch: Any = None
    mm_processor_kwargs: Any = None
    return_mm_kwargs: Any = None
    return_token_offsets: Any = None
    use_audio_in_video: Any = None


def shared_fields(request: SharedFields) -> dict[str, Any]:
    """The fields that `request` shares with all generation routes, to make another route's request of it."""
    return {name: getattr(request, name) for name in SharedFields.__struct_fields__}


class GenerationFields(SharedFields, kw_only=True):
    """What chat and completions have in common besides."""

    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    """Tokens whose logprobs are reported instead of those of the most likely."""
    logprob_start: int | None = None
    stop: str | list[str] | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Logprobs call tokens `token_id:5`."""
    session_params: SessionParams | None = None
    """The prompt is the next turn of a session; see docs/features.md."""
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    verbosity: str | None = None


class ContentPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None
    # What parts of other types have. `chat_messages` refuses them with a sentence about the type.
    image_url: Any = None
    image_embeds: Any = None
    input_audio: Any = None
    audio_url: Any = None
    video_url: Any = None
    file: Any = None
    refusal: Any = None
    thinking: Any = None
    uuid: Any = None


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class CalledTool(msgspec.Struct, kw_only=True):
    """A finished tool call of an answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class SentFunction(CalledFunction, kw_only=True, forbid_unknown_fields=True):
    parsed_arguments: Any = None


class SentCall(CalledTool, kw_only=True, forbid_unknown_fields=True):
    """A tool call in a message that a client sends back."""

    function: SentFunction
    index: Any = None
    cache_control: Any = None


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[SentCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's newer name of the same."""
    annotations: Any = None
    cache_control: Any = None
    parsed: Any = None
    provider_specific_fields: Any = None
    audio: Refused = None
    function_call: Refused = None
    refusal: Refused = None


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


TemplateVariables = dict[str, Any]
"""Variables of the chat template by name, as `chat_messages.template_variables` checks them."""


class ChatRequest(GenerationFields, kw_only=True):
    messages: list[ChatMessage] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
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
    chat_template_kwargs: TemplateVariables | None = None
    tools: list[Tool] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None
