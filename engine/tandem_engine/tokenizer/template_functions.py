"""What chat templates of Hugging Face expect beside Jinja's own functions."""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from tandem_engine.tokenizer.traced_text import TEMPLATE, UNKNOWN, TracedText, only_origin


class RefusedMessagesError(Exception):
    """A template called `raise_exception`: it cannot express these messages."""


def raise_exception(message: str) -> None:
    raise RefusedMessagesError(message)


def plain_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`. Jinja's own escapes HTML, which prompts do not want."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def clock(now: datetime) -> Callable[[str], str]:
    """`strftime_now`, standing still: two renderings of one conversation show the same time."""

    def strftime_now(pattern: str) -> str:
        text = now.strftime(pattern)
        if not isinstance(pattern, TracedText):
            return text
        origin = TEMPLATE if only_origin(pattern) == TEMPLATE else UNKNOWN
        return TracedText(text, origin * len(text))

    return strftime_now
