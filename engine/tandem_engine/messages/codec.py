"""Typed msgpack with a version byte and a size limit. No pickle anywhere [no-pickle].

msgspec learns what a struct or dataclass contains at its first use. While one thread is at it, another that needs the
same type reads what is not complete, and the process ends with a segmentation fault (seen with msgspec 0.22). So
decoders are made by one thread at a time.
"""

import threading
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec

from tandem_engine.base.errors import WireError

_making = threading.Lock()


def msgpack_decoder(kind: object) -> "msgspec.msgpack.Decoder[Any]":
    """Decodes msgpack to `kind`; one for all threads, which may decode with it at the same time."""
    with _making:
        return _made(kind)


@cache
def _made(kind: object) -> "msgspec.msgpack.Decoder[Any]":
    return msgspec.msgpack.Decoder(kind)


WIRE_VERSION = 1
MAX_MESSAGE_BYTES = 64 << 20
T = TypeVar("T")


class Codec(Generic[T]):
    """Encodes and decodes one tagged union of message structs.

    Raises `WireError` from `decode` for anything that is not a whole, well-typed message of this version.
    """

    def __init__(self, message_type: object) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgpack_decoder(message_type)

    def encode(self, message: T) -> bytes:
        return bytes((WIRE_VERSION,)) + self._encoder.encode(message)

    def decode(self, data: bytes) -> T:
        if len(data) > MAX_MESSAGE_BYTES:
            raise WireError(f"message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        if not data or data[0] != WIRE_VERSION:
            seen = data[0] if data else "nothing"
            raise WireError(f"wire version {seen}, this process speaks {WIRE_VERSION}")
        try:
            return self._decoder.decode(memoryview(data)[1:])
        # msgspec reports a string that is not UTF-8 by an error that is none of its own.
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"undecodable message: {error}") from error
