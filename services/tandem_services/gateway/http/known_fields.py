"""The table of all request fields, and how each route treats them: served, without effect, or rejected.

Fields of a body:

    served           the route's struct has the field
    without effect   the struct has it, and its value changes nothing here (`WITHOUT_EFFECT`)
    rejected         `KNOWN_FIELDS` has it and the route does not: 400 with its name, unless its value requests nothing
                     (`neutral_values`)
    unknown          neither has it: ignored, or rejected with `--strict-fields`

`KNOWN_FIELDS` contains the fields of OpenAI's, Anthropic's, vLLM's and SGLang's requests and Tandem's own. A field that
one route serves is therefore never silently ignored by another.

Fields of objects within a body, which define what the object means:

    served           the object's struct has the field
    without effect   the struct has it, and its value changes nothing here (`NESTED_WITHOUT_EFFECT`)
    rejected         its type is `Refused`: null is accepted, any other value is a 400 with the path of the field
    unknown          a 400 with the path: these structs are declared with `forbid_unknown_fields`
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

import msgspec
from msgspec import inspect

from tandem_engine.base.logs import quoted
from tandem_services.common.errors import ApiError, bad_request

T = TypeVar("T", bound=msgspec.Struct)

WITHOUT_EFFECT: Mapping[str, str] = {
    "cache_control": "prefixes are always cached",
    "custom_labels": "metrics have no labels that clients choose",
    "images_config": "there are no images",
    "max_dynamic_patch": "there are no images",
    "media_io_kwargs": "there are no media",
    "metadata": "nothing is kept; of Anthropic's, `user_id` is the `user`",
    "min_dynamic_patch": "there are no images",
    "mm_processor_kwargs": "there are no media",
    "prompt_cache_options": "prefixes are always cached",
    "prompt_cache_retention": "prefixes are always cached",
    "return_mm_kwargs": "there are no media",
    "return_token_offsets": "vLLM has it for routes that only render prompts",
    "safety_identifier": "nothing is moderated",
    "service_tier": "there is one",
    "store": "chats are not kept",
    "use_audio_in_video": "there are no media",
    "user_profile_id": "for the bills of Anthropic's clients",
    "verbosity": "for models of OpenAI's",
    "workspace_id": "for the credentials of Anthropic's clients",
}
"""Why the value of a field changes nothing, on each route that has the field in its struct."""

_OPENAI = (
    "access_programs audio background background_options best_of context_management conversation dimensions echo "
    "encoding_format frequency_penalty function_call functions image include input instructions logit_bias logprobs "
    "max_completion_tokens max_output_tokens max_tokens max_tool_calls messages metadata modalities model "
    "moderation n parallel_tool_calls prediction presence_penalty previous_response_id prompt prompt_cache_key "
    "prompt_cache_options prompt_cache_retention reasoning reasoning_effort response_format safety_identifier seed "
    "service_tier stop store stream stream_options suffix temperature text tool_choice tools top_logprobs top_p "
    "truncation user verbosity web_search_options"
)

_ANTHROPIC = (
    "cache_control container context_management diagnostics inference_geo max_tokens mcp_servers messages metadata "
    "model output_config service_tier speed stop_sequences stream system temperature thinking tool_choice tools "
    "top_k top_p user_profile_id workspace_id"
)

_VLLM = (
    "add_generation_prompt add_special_tokens additional_data allowed_token_ids bad_words cache_salt chat_template "
    "chat_template_kwargs continue_final_message documents ec_transfer_params embed_dtype enable_response_messages "
    "endianness guided_choice guided_decoding_backend guided_grammar guided_json guided_regex "
    "guided_whitespace_pattern ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params "
    "length_penalty logits_processors logprob_token_ids media_io_kwargs min_p min_tokens mm_processor_kwargs "
    "normalize padding previous_input_messages previous_response priority prompt_embeds prompt_logprobs "
    "repetition_detection repetition_penalty request_id return_mm_kwargs return_prompt_text return_token_ids "
    "return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start session_id skip_special_tokens "
    "spaces_between_special_tokens stop_token_ids stream_interval structural_tag structured_outputs "
    "thinking_token_budget top_k truncate_prompt_tokens truncation_side use_activation use_beam_search vllm_xargs "
    "watermarking"
)

_SGLANG = (
    "bootstrap_host bootstrap_port bootstrap_room custom_labels custom_logit_processor custom_params "
    "data_parallel_rank disagg_prefill_dp_rank ebnf embed_override_token_id embed_overrides extra_key image_embeds "
    "images_config input_ids json_schema lora_path max_dynamic_patch min_dynamic_patch ngram_corpus_id no_stop_trim "
    "regex return_cached_tokens_details return_hidden_states return_meta_info return_prompt_token_ids "
    "return_routed_experts rid routed_dp_rank routed_experts_start_len separate_reasoning session_params stop_regex "
    "stream_reasoning task use_audio_in_video"
)
_TANDEM = "logprob_start parse_special_tokens pooling slo timeout"
KNOWN_FIELDS = frozenset(" ".join((_OPENAI, _ANTHROPIC, _VLLM, _SGLANG, _TANDEM)).split())

_OFF: tuple[Any, ...] = (False, "", [])
"""Values that ask for nothing, of any field that has no others in `_NEUTRAL`."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "chat_template_kwargs": ({},),
    "custom_params": ({},),
    "metadata": ({},),
    "slo": ({},),
    "stream_options": ({},),
    "vllm_xargs": ({},),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "function_call": ("none",),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "best_of": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "padding": ("do_not_pad",),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "routed_experts_prompt_start": (0,),
    "routed_experts_start_len": (0,),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    # No fast tokenizer writes any.
    "spaces_between_special_tokens": (True, False),
    "speed": ("standard",),
    "stream_interval": (1,),
    "stream_reasoning": (True,),
    "tool_choice": ("none", "auto"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "use_activation": (True,),
}

_INSTEAD: Mapping[str, str] = {
    "background": "each answer comes on the connection of its request",
    "bootstrap_host": "the gateway pairs prefill and decode workers itself: leave it out",
    "chat_template": "the gateway renders with the checkpoint's own template: pass variables in chat_template_kwargs",
    "context_management": "a conversation is answered as it was sent",
    "conversation": "conversations are not kept here: send the whole conversation as input",
    "echo": "ask /v1/completions",
    "extra_key": "use cache_salt",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "guided_decoding_backend": "the engine's --grammar-backend applies to all requests: leave it out",
    "input_ids": "send token ids as the prompt of /v1/completions",
    "length_penalty": "leave it out or set it to 1.0: it ranks beams, and there is no beam search",
    "logprobs": "logprobs are served by /v1/chat/completions and /v1/completions",
    "max_tool_calls": "the client runs tools and can count them",
    "mcp_servers": "the client runs tools",
    "container": "the client runs code",
    "moderation": "nothing is moderated here",
    "previous_response_id": "responses are not kept: send the whole conversation as input",
    "previous_response": "responses are not kept: send the whole conversation as input",
    "prompt": "send messages (or the Responses API's input)",
    "reasoning": "use reasoning_effort or thinking_token_budget",
    "return_cached_tokens_details": "usage.prompt_tokens_details.cached_tokens is in every answer",
    "return_prompt_token_ids": "use return_token_ids",
    "separate_reasoning": "to leave reasoning out of a chat's answer, set include_reasoning to false",
    "stop_regex": "use stop for fixed strings, or a grammar (structured_outputs.regex) for the whole output",
    "store": "responses are not kept: leave it out or set it to false, and send the whole conversation as input",
    "thinking_token_budget": "ask for a chat, whose outputs are divided into reasoning and answer",
    "top_logprobs": "logprobs are served by /v1/chat/completions",
    "truncation": "an input that is too long is refused, never cut",
    "use_beam_search": "leave it out, and ask for the likeliest of several choices with best_of",
}
"""What a client can do, where that is more than to leave the field out."""

_OWN_NAMES: Mapping[str, Mapping[str, str]] = {
    "MessagesRequest": {
        "input": "messages",
        "instructions": "system",
        "max_completion_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "reasoning": "thinking",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
        "text": "output_config.format",
        "thinking_token_budget": "thinking.budget_tokens",
        "user": "metadata.user_id",
    },
    "ResponsesRequest": {
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "prompt": "input: there are no stored prompts",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
        "stop_sequences": "stop",
        "system": "instructions",
        "thinking": "reasoning",
        "thinking_token_budget": "reasoning.max_tokens",
        "verbosity": "text.verbosity",
    },
    "ChatRequest": {
        "input": "messages",
        "instructions": "a message of the role system",
        "max_output_tokens": "max_completion_tokens",
        "output_config": "response_format",
        "stop_sequences": "stop",
        "system": "a message of the role system",
        "text": "response_format",
        "thinking": "chat_template_kwargs.enable_thinking and thinking_token_budget",
    },
    "CompletionRequest": {
        "input": "prompt",
        "max_completion_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
        "messages": "/v1/chat/completions",
        "stop_sequences": "stop",
        "top_logprobs": "logprobs",
    },
    "EmbeddingRequest": {"messages": "input", "prompt": "input", "use_activation": "normalize"},
}
"""What a route has in place of another route's field."""


def refused_fields(shape: type[msgspec.Struct]) -> tuple[str, ...]:
    """Known fields that requests of `shape` do not have."""
    return tuple(sorted(KNOWN_FIELDS - {*shape.__struct_encode_fields__}))


def neutral_values(field: str) -> tuple[Any, ...]:
    """Values, in addition to null, that request nothing where `field` is rejected."""
    return _NEUTRAL.get(field, _OFF)


class Refusals(Generic[T]):
    """The fields that requests of `shape` do not have, refused by name."""

    def __init__(self, shape: type[T]) -> None:
        self._names = refused_fields(shape)
        self._values = attrgetter(*self._names)
        self._own_names = _OWN_NAMES.get(shape.__name__, {})
        places = [(name, Any, None) for name in self._names]
        wider = msgspec.defstruct(shape.__name__, places, bases=(shape,), module=shape.__module__, kw_only=True)
        self.decoded = cast(type[T], wider)
        """`shape` with a place for each of them, so that a decoder sees whether a body has one."""

    def check(self, request: msgspec.Struct) -> None:
        """Raises `ApiError` 400 naming the first field of a `decoded` that requests something."""
        values = self._values(request)
        if values.count(None) == len(values):
            return
        for name, value in zip(self._names, values, strict=True):
            if value is not None and not _is_neutral(name, value):
                raise bad_request(f"{name} is not supported here; {self._advice(name)}", name)

    def _advice(self, field: str) -> str:
        own = self._own_names.get(field)
        return f"use {own}" if own is not None else _INSTEAD.get(field, "leave it out")


def _is_neutral(field: str, value: Any) -> bool:
    # JSON's true is not 1: a penalty of `true` is a mistake, not a default.
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in neutral_values(field)
    )


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

_NESTED_INSTEAD: Mapping[str, str] = {
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
    """`messages[].content[]`; with the value of its tag where that determines the type: `tool_choice(function)`."""
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
        advice = _NESTED_INSTEAD.get(path.rpartition(".")[2], "leave it out")
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
