"""Bounds on the shape of a JSON body, checked on its bytes before anything is parsed.

Parsers recurse, and what walks their result recurses again. The scan costs nothing on ordinary bodies: one with
fewer brackets than levels allowed cannot be nested too deeply, whatever is in its strings, and one with few quotes
cannot have many strings.
"""

import re

from tandem_services.common.errors import ApiError, bad_request

MAX_JSON_DEPTH = 64
MAX_JSON_PARTS = 100_000
"""Strings, keys too, and runs of brackets of one body that has many: keeps the scan within tens of milliseconds."""
MAX_JSON_VALUES = 1 << 21
"""Of all lists and objects together: more token ids than any context takes. Each is an object of its own in memory, and
while a thread parses them no other thread runs."""

_STRINGS = re.compile(rb'"[^"]*"?')
_PARTS = re.compile(rb'"[^"]*"?|[\[{]+|[\]}]+')
_OPENING = b"[{"


def check_json_shape(body: bytes) -> None:
    """Raise `ApiError` 400 for a body that is nested too deeply or made of too many parts or values.

    Says nothing about bodies that are no JSON: the decoder names what is wrong with them.
    """
    many_values = body.count(b",") > MAX_JSON_VALUES
    many_strings = body.count(b'"') > 2 * MAX_JSON_PARTS
    if not (many_values or many_strings or body.count(b"[") + body.count(b"{") > MAX_JSON_DEPTH):
        return
    body = _unescaped(body)
    # First: taking millions of strings out below would keep all other threads from running for seconds.
    if many_strings and body.count(b'"') > 2 * MAX_JSON_PARTS:
        raise _too_many_parts()
    if many_values and _STRINGS.sub(b"", body).count(b",") > MAX_JSON_VALUES:
        raise bad_request(f"request body has more than {MAX_JSON_VALUES} values")
    depth = 0
    for number, part in enumerate(_PARTS.finditer(body)):
        first, length = body[part.start()], part.end() - part.start()
        if first in _OPENING:
            depth += length
        elif first != ord('"'):
            depth -= length
        if depth > MAX_JSON_DEPTH:
            raise bad_request(f"request body is nested deeper than {MAX_JSON_DEPTH} levels")
        if number >= MAX_JSON_PARTS:
            raise _too_many_parts()


def _too_many_parts() -> ApiError:
    return bad_request(f"request body has more than {MAX_JSON_PARTS} strings, lists and objects")


def _unescaped(body: bytes) -> bytes:
    """Without escaped backslashes, which go first, or the quote after one would look escaped, and escaped quotes."""
    return body.replace(rb"\\", b"").replace(rb"\"", b"")
