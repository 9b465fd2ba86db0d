"""Decoders of msgspec, made by one thread at a time.

msgspec learns what a struct or dataclass contains at its first use. While one thread is at it, another that needs the
same type reads what is not complete, and the process ends with a segmentation fault (seen with msgspec 0.22).
"""

import threading
from functools import cache
from typing import Any

import msgspec

_making = threading.Lock()


def msgpack_decoder(kind: object) -> "msgspec.msgpack.Decoder[Any]":
    """Decodes msgpack to `kind`; one for all threads, which may decode with it at the same time."""
    with _making:
        return _made(kind)


@cache
def _made(kind: object) -> "msgspec.msgpack.Decoder[Any]":
    return msgspec.msgpack.Decoder(kind)
