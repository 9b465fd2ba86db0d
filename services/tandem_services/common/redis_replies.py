"""Replies of Redis that hold a document of ours, or what somebody else has put in its place."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from tandem_services.common.redis_client import Reply

T = TypeVar("T")


def decoded(reply: Reply, decode: Callable[[bytes], T]) -> T:
    """What a reply says. Raises `ValueError` for one that is no bytes, or that `decode`, of msgspec, cannot read."""
    if not isinstance(reply, bytes):
        raise ValueError(f"it is {type(reply).__name__} instead of bytes")
    try:
        return decode(reply)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
