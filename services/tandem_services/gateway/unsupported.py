"""Request fields that would change the answer and that this version does not implement.

They are refused with their name unless their value asks for nothing: an ignored field would be a wrong
answer with status 200. Fields that are not listed and not known are accepted and ignored.
"""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from tandem_services.common.errors import bad_request


class UnsupportedFields(msgspec.Struct, kw_only=True):
    """Fields of chat and completion requests that are refused unless neutral."""

    length_penalty: Any = None
    use_beam_search: Any = None
    spaces_between_special_tokens: Any = None
    kv_transfer_params: Any = None
    prompt_embeds: Any = None
    image_embeds: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    lora_path: Any = None
    suffix: Any = None
    functions: Any = None
    function_call: Any = None
    chat_template: Any = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    web_search_options: Any = None
    moderation: Any = None


_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "use_beam_search": (False,),
    # None are written here, nor by any fast tokenizer.
    "spaces_between_special_tokens": (True, False),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none",),
    "include_reasoning": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "modalities": (["text"],),
}
"""Values, beside null, that mean "as if the field were absent"."""

_INSTEAD: Mapping[str, str] = {
    "use_beam_search": "leave it out, and ask for the likeliest of several choices with best_of",
    "length_penalty": "leave it out or set it to 1.0: it ranks beams, and there is no beam search",
    "thinking_token_budget": "ask for a chat, whose outputs are divided into reasoning and answer",
}
"""What to do about it, where there is more to say than to leave it out."""
_FIELDS = UnsupportedFields.__struct_fields__
_OF_TEMPLATES = ("continue_final_message", "documents", "reasoning_effort")
FIELDS_OF_CHATS = ("tools", "tool_choice", "include_reasoning", "thinking_token_budget", *_OF_TEMPLATES)
"""What completion requests refuse as well."""


SERVED_BY_COMPLETIONS = frozenset({"suffix"})
"""What chat requests alone refuse."""


def neutral_values(also: tuple[str, ...] = (), *, but: Collection[str] = ()) -> Mapping[str, tuple[Any, ...]]:
    """What `refuse_unsupported` lets pass, beside null, by field."""
    return {name: _NEUTRAL.get(name, ()) for name in (*_FIELDS, *also) if name not in but}


def refuse_unsupported(fields: UnsupportedFields, also: tuple[str, ...] = (), *, but: Collection[str] = ()) -> None:
    """Raise a 400 naming the first field, of these and those in `also` but not in `but`, whose value is not neutral."""
    values = msgspec.structs.asdict(fields)
    for name in (*_FIELDS, *also):
        value = values[name]
        if value is not None and name not in but and not _is_neutral(name, value):
            raise bad_request(f"{name} is not supported; {_INSTEAD.get(name, 'leave it out')}", name)


def _is_neutral(name: str, value: Any) -> bool:
    # JSON's true is not 1: a penalty of `true` is a mistake, not a default.
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in _NEUTRAL.get(name, ())
    )
