"""Reads a request body, checks its shape, and decodes it to a struct. Every rejection names its reason.

1. Read: the bytes are charged to the `BodyBudget` of the gateway as they arrive, so that a body without Content-Length
   cannot exhaust memory.
2. Check (`check_json_shape`): depth and number of parts are bounded on the raw bytes, because parsers and the code that
   walks their results recurse. The scan is free for ordinary bodies: one with fewer brackets than allowed levels
   cannot be nested too deeply, and one with few quotes cannot contain many strings.
3. Decode (`BodyDecoder`): a thread parses long bodies, one at a time.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct, inspect
from starlette.requests import Request
from starlette.types import Receive, Scope

from tandem_engine.base.logs import quoted
from tandem_engine.base.thread_pools import started_pool
from tandem_services.common.errors import ApiError, bad_request
from tandem_services.common.tokens import is_json
from tandem_services.gateway.http.interruption import ClientGoneError, client_of
from tandem_services.gateway.http.known_fields import Refusals, nested_refusal
from tandem_services.gateway.http.middleware import RequestIdentity, identity_of
from tandem_services.gateway.limits import BODY_TIMEOUT_S, PARSED_HERE_BYTES, BodyCharge

_STEP = re.compile(r"\w+|\[[^]]*\]")


@cache
def _type_of(shape: type[Struct]) -> inspect.Type:
    return inspect.type_info(shape)


def allowed_values(shape: type[Struct], path: str) -> tuple[str | int, ...]:
    """Of the field at `path`, as msgspec writes it (`messages[0].role`); empty where it may say anything."""
    types = [*_alternatives(_type_of(shape))]
    for step in _STEP.findall(path):
        types = [inner for each in types for inner in _within(each, step)]
    return tuple(dict.fromkeys(value for each in types for value in _values(each)))


def _alternatives(type_: inspect.Type) -> Iterator[inspect.Type]:
    match type_:
        case inspect.UnionType(types=types):
            for each in types:
                yield from _alternatives(each)
        case inspect.Metadata(type=inner):
            yield from _alternatives(inner)
        case _:
            yield type_


def _within(type_: inspect.Type, step: str) -> Iterator[inspect.Type]:
    """The types of a named field, or of the items of an array or object."""
    inner: list[inspect.Type] = []
    match type_:
        case inspect.StructType(fields=fields) if not step.startswith("["):
            inner = [field.type for field in fields if field.encode_name == step]
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item) if step.startswith("["):
            inner = [item]
        case inspect.DictType(value_type=value) if step.startswith("["):
            inner = [value]
    for each in inner:
        yield from _alternatives(each)


def _values(type_: inspect.Type) -> Iterator[Any]:
    match type_:
        case inspect.LiteralType(values=values):
            yield from values
        case inspect.EnumType(cls=cls) if issubclass(cls, Enum):
            yield from (member.value for member in cls)


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

    Does not check that bodies are JSON: the decoder reports what is wrong with them.
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


logger = logging.getLogger(__name__)

MAX_NAMED_FIELDS = 8
"""Of those that are not known, in the answer: others are counted."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_AT_PATH = re.compile(r" - at `\$\.?(.*?)`$")
_AT_BYTE = re.compile(r"\(byte (\d+)\)$")
_NOT_FINITE = re.compile(rb"-?(NaN|nan|Infinity|inf)")
_NO_SUCH_VALUE = "invalid enum value"
_MISSING_FIELD = re.compile(r"Object missing required field `(\w+)`")
T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")


async def read_body(request: Request) -> bytes:
    """As `body_of`, of a route of the framework."""
    return await body_of(request.scope, request.receive)


async def body_of(scope: Scope, receive: Receive) -> bytes:
    """The whole body. Raises `ApiError` 400, 408, 413, 415 or 429; `ClientGoneError` when the client leaves.

    It is charged until `identity_of(scope).body` is released, at the end of the request at the latest.
    """
    identity, client = identity_of(scope), client_of(scope)
    _check_content_headers(identity)
    if client.has_sent_all and client.body is not None:
        body = client.body.take_request()
        if body is None:
            raise ClientGoneError
        identity.body.hold(_client_of(identity, scope), len(body))
        return body
    identity.body.announce(_client_of(identity, scope), _announced(identity))
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _counted_body(receive, identity.body)
    except TimeoutError as error:
        message = f"request body did not arrive within {BODY_TIMEOUT_S:g} s"
        raise ApiError(408, message, kind="RequestTimeoutError") from error


async def decode_body(decode: Callable[[bytes], R], body: bytes) -> R:
    """What `decode` makes of `body`; on a thread where that takes the event loop too long. Raises what it raises."""
    if len(body) <= PARSED_HERE_BYTES:
        return decode(body)
    return await asyncio.get_running_loop().run_in_executor(body_parser(), decode, body)


@cache
def body_parser() -> ThreadPoolExecutor:
    """The thread of this process that decodes large bodies. Raises `ConfigError` when it cannot be started."""
    return started_pool(1, name="request-body")


async def _counted_body(receive: Receive, charge: BodyCharge) -> bytes:
    """Raises `ClientGoneError`."""
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk = message.get("body", b"")
        charge.add(len(chunk))
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _client_of(identity: RequestIdentity, scope: Scope) -> str:
    """Tenants and addresses cannot be taken for each other: no tenant's name has a colon."""
    if identity.caller.known:
        return f"tenant:{identity.caller.tenant.name}"
    address = scope.get("client")
    return f"address:{address[0]}" if address else ""


def _announced(identity: RequestIdentity) -> int:
    """Content-Length of the head; 0 without one."""
    length = identity.header(b"content-length") or ""
    return int(length[:20]) if length.isdecimal() else 0


@cache
def _refusals_of(shape: type[Struct]) -> Refusals[Any]:
    return Refusals(shape)


@cache
def _decoder_of(shape: type[Struct]) -> msgspec.json.Decoder[Any]:
    """Made of all fields of all its parts, which takes longer than most requests."""
    return msgspec.json.Decoder(shape)


class BodyDecoder(Generic[T]):
    """From bytes to requests of one `shape`.

    Fields that it does not have are ignored, with a line in the debug log; `strict` refuses them instead.
    """

    def __init__(self, shape: type[T], *, strict: bool, closed: bool = False) -> None:
        """`closed`: fields in `KNOWN_FIELDS` that `shape` lacks are rejected."""
        self._shape = shape
        self._refusals = _refusals_of(shape) if closed else None
        decoded: type[Struct] = shape if self._refusals is None else self._refusals.decoded
        self._decoder: msgspec.json.Decoder[T] = _decoder_of(decoded)
        self._strict = strict

    def decode(self, body: bytes) -> T:
        """Raises `ApiError` 400 naming the field at fault as `param`."""
        if not body.strip():
            raise bad_request("request body is empty")
        body = body.removeprefix(_BYTE_ORDER_MARK)
        check_json_shape(body)
        try:
            if not body.isascii():
                # The decoder does not check the bytes of fields that it skips.
                body.decode()
            request = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _wrong_shape(str(error), self._shape, body) from error
        except msgspec.DecodeError as error:
            raise _no_json(str(error), body) from error
        except UnicodeDecodeError as error:
            raise bad_request("request body is not valid UTF-8") from error
        if self._refusals is not None:
            self._refusals.check(request)
        if self._strict or logger.isEnabledFor(logging.DEBUG):
            self._warn_unknown_fields(request, body)
        return request

    def _warn_unknown_fields(self, request: T, body: bytes) -> None:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys()
        unknown = sorted(fields - set(request.__struct_encode_fields__))
        if not unknown:
            return
        if not self._strict:
            logger.debug("ignored unknown request fields", extra={"fields": {"names": [*map(quoted, unknown)]}})
            return
        names = ", ".join(map(quoted, unknown[:MAX_NAMED_FIELDS]))
        more = f" and {len(unknown) - MAX_NAMED_FIELDS} more" if len(unknown) > MAX_NAMED_FIELDS else ""
        raise bad_request(f"unknown fields: {names}{more}", quoted(unknown[0]))


def _check_content_headers(identity: RequestIdentity) -> None:
    encoding = identity.header(b"content-encoding")
    if encoding is not None and encoding.strip().lower() != "identity":
        named = quoted(encoding.strip().lower())
        raise _unsupported_type(f"Content-Encoding {named} is not supported, send the body as it is")
    content_type = identity.header(b"content-type")
    if content_type == "application/json":
        return
    media, _, parameters = (content_type or "").partition(";")
    # Without one a page of another site may send it without asking: browsers ask first for JSON alone.
    if not is_json(content_type):
        got = "none" if content_type is None else quoted(media.strip().lower())
        raise _unsupported_type(f"Content-Type must be application/json, got {got}")
    charset = re.search(r'charset\s*=\s*"?([^";\s]+)', parameters, re.IGNORECASE)
    if charset and charset[1].lower() not in ("utf-8", "utf8"):
        raise bad_request(f"charset must be utf-8, got {quoted(charset[1])}")


def _unsupported_type(message: str) -> ApiError:
    return ApiError(415, message, kind="UnsupportedMediaTypeError")


def _no_json(detail: str, body: bytes) -> ApiError:
    """The error of msgspec; numbers that only other languages accept are named as such."""
    place = _AT_BYTE.search(detail)
    # A minus before it is what the decoder could still read.
    if place and (_NOT_FINITE.match(body, int(place[1])) or _NOT_FINITE.match(body, max(int(place[1]) - 1, 0))):
        return bad_request(f"request body is not valid JSON: not a finite number (byte {place[1]})")
    return bad_request(f"request body is not valid JSON: {detail}")


def _wrong_shape(detail: str, shape: type[msgspec.Struct], body: bytes) -> ApiError:
    """msgspec's "Expected `int | null`, got `str` - at `$.n`" as a sentence about `n`."""
    path = _AT_PATH.search(detail)
    nested = nested_refusal(detail, "" if path is None else path[1], body)
    if nested is not None:
        return nested
    what = (detail[: path.start()] if path else detail).replace("`", "")
    what = what.replace(" | null", "").replace(" | ", " or ")
    what = quoted(what[:1].lower() + what[1:])
    what = what.replace("number out of range", "number out of range: not a finite number")
    missing = _MISSING_FIELD.match(detail)
    if missing:
        name = f"{path[1]}.{missing[1]}" if path else missing[1]
        return bad_request(f"{name} is required", name)
    if path is None:
        return bad_request(f"request body must be a JSON object: {what}")
    name = quoted(path[1])
    allowed = allowed_values(shape, path[1]) if what.startswith(_NO_SUCH_VALUE) else ()
    instead = f": use one of {', '.join(map(str, allowed))}" if allowed else ""
    return bad_request(f"{name}: {what}{instead}", name)
