"""JSON from a model directory: hostile until proven otherwise, so sizes and duplicates are checked."""

import json
import reprlib
from pathlib import Path

from tandem_engine.errors import CheckpointError

MAX_SHOWN = 80
"""Longest value that an error message repeats: a checkpoint must not choose the size of our logs."""


def read_json_object(path: Path, *, max_bytes: int) -> dict[str, object]:
    """Parse the file `path` as one JSON object of at most `max_bytes`.

    Raises:
        CheckpointError: it cannot be read, is larger, or is not a JSON object without duplicate keys.
    """
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise CheckpointError(f"{path} has {size} bytes; at most {max_bytes} are expected in such a file")
        return parse_json_object(path.read_bytes(), where=str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def parse_json_object(data: bytes, *, where: str) -> dict[str, object]:
    """Parse `data`; `where` starts the message of a `CheckpointError`."""
    try:
        value = json.loads(data, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = str(error).removeprefix("maximum recursion depth exceeded") or "nested too deeply"
        raise CheckpointError(f"{where} is not valid JSON: {reason}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must hold a JSON object, got {shown(value)}")
    return value


def shown(value: object) -> str:
    """`value` as an error message may repeat it: short, however large or deeply nested it is."""
    short = reprlib.Repr()
    short.maxstring = MAX_SHOWN
    text = short.repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"the key {shown(key)} stands twice")
        seen.add(key)
    raise AssertionError("unreachable: a dict is shorter than its pairs only by a repeated key")


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")
