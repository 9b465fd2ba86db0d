"""OpenAI's request and response bodies, as far as they are served.

Requests are decoded strictly: a wrong type is a 400 that names the field, and null means absent. Unknown fields of a
body are ignored; those of objects within it are rejected (`known_fields`). If a key occurs twice, the last one counts.

Responses always contain the fields that OpenAI's specification requires, also when they are null.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import msgspec
from msgspec import UNSET, UnsetType

from tandem_engine.tokenizer.text_tokenizer import TruncationSide
from tandem_services.common.errors import bad_request
from tandem_services.gateway.dispatch.sessions import SessionParams
from tandem_services.gateway.http.known_fields import Refused
from tandem_services.gateway.objectives import SloFields
from tandem_services.gateway.output.structured_output import GrammarFields, ResponseFormat
from tandem_services.gateway.output.tools import Tool, ToolChoice

PromptItem = str | int | list[int]
Prompt = str | list[int]


def split_prompts(prompt: str | list[PromptItem] | None, *, param: str, most: int) -> Sequence[Prompt]:
    """The four shapes of field `param` as a list of texts or id lists.

    Raises:
        ApiError: 400 for an empty or mixed one, and for more than `most` prompts.
    """
    if prompt is None or len(prompt) == 0:
        raise bad_request(f"{param} must not be empty", param)
    if isinstance(prompt, str):
        return [prompt]
    # On the event loop, for millions of ids: no step of Python for each.
    if set(map(type, prompt)) == {int}:
        return [cast("list[int]", prompt)]
    if len(prompt) > most:
        raise bad_request(f"{param} takes at most {most} prompts, got {len(prompt)}", param)
    return [_one_prompt(item, position, param) for position, item in enumerate(prompt)]


def _one_prompt(item: PromptItem, position: int, param: str) -> Prompt:
    if isinstance(item, int):
        raise bad_request(f"{param}[{position}]: token ids and texts cannot be mixed", param)
    if not item:
        raise bad_request(f"{param}[{position}] must not be empty", param)
    return item


def place_of(prompt: str | list[PromptItem] | None, position: int, param: str) -> str:
    """Where the prompt that `split_prompts` has at `position` is in the request: field `param`, or an item of it."""
    alone = not isinstance(prompt, list) or isinstance(prompt[position], int)
    return param if alone else f"{param}[{position}]"


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """With vLLM's defaults."""

    include_usage: bool | msgspec.UnsetType | None = msgspec.UNSET
    """Options that do not have it ask for usage, `{}` too."""
    continuous_usage_stats: bool | None = None
    """Usage in every chunk; only with `include_usage`."""
    include_obfuscation: Any = None

    @property
    def includes_usage(self) -> bool:
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
    slo: SloFields | None = None
    """Latency objectives; see docs/slo.md."""
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
    # What parts of other types have. `chat` refuses them with a sentence about the type.
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
"""Variables of the chat template by name, as `chat.template_variables` checks them."""


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
    annotations: None = None
    audio: None = None
    function_call: None = None
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
    service_tier: None = None
    system_fingerprint: None = None
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
    refusal: UnsetType | None = UNSET
    """Null in the first delta of a choice, as OpenAI writes it."""
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
    service_tier: None = None
    system_fingerprint: None = None
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
    system_fingerprint: None = None


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """vLLM's, as far as the gateway reads the tokenizer's files."""

    tokenizer_class: Literal["PreTrainedTokenizerFast"] = "PreTrainedTokenizerFast"
    model_max_length: int | None
    vocab_size: int
    eos_token_ids: Sequence[int]
    special_tokens: Mapping[str, str]
    """Those that chat templates may use, by name."""
    chat_template: str | None
