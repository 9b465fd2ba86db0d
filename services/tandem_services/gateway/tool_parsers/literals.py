"""Values that models write in other forms than JSON, as JSON. Nothing is evaluated but literals."""

import ast
import json

MAX_LITERAL_CHARACTERS = 64 << 10
"""Longer text is not parsed as Python: what is that long is a text."""


def json_or_literal(text: str) -> str:
    """JSON as it is, a Python literal as JSON, anything else as a JSON string."""
    text = text.strip()
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return python_literal(text)
    return text


def python_literal(text: str) -> str:
    """A Python literal as JSON; anything else as a JSON string."""
    try:
        if len(text) > MAX_LITERAL_CHARACTERS:
            raise ValueError("too long to be looked into")
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return json_string(text)


def json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
