"""Storage below host memory: blocks that outlive their page, and the process.

Implementations never raise for what is wrong with the medium: a block that cannot be read, or is not what
it should be, is a miss; one that cannot be written is not stored.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class PutReport:
    """What became of a block that was offered."""

    stored: bool
    evicted: tuple[bytes, ...] = ()
    """Keys of blocks that had to make room."""


class Fetched(Enum):
    """What became of a block that was asked for."""

    WHOLE = "whole"
    ABSENT = "absent"
    """It left before it was read; a `PutReport` or a `clear` told."""
    LOST = "lost"
    """It should have been there and cannot be read, or is not what it should be. It is gone now."""


class HostStorage(Protocol):
    """Maps block hashes to the bytes of a page. Called by the scheduler thread, works on threads of its own.

    Operations take effect in the order in which they were asked for. The caller leaves a buffer alone until
    the future of its operation is done.
    """

    def __contains__(self, key: bytes) -> bool:
        """Whether a `get` has a chance. No I/O."""
        ...

    def __len__(self) -> int: ...

    def hashes(self) -> Iterator[bytes]:
        """Every block there is, for a replay of events."""
        ...

    def put(self, key: bytes, page: memoryview) -> "Future[PutReport]":
        """Store the bytes of `page` under `key`."""
        ...

    def get(self, key: bytes, page: memoryview) -> "Future[Fetched]":
        """Fill `page`. Unless WHOLE it holds anything."""
        ...

    def clear(self) -> None:
        """Forget every block that `get` could find, those that are still being written included."""
        ...

    def close(self) -> None:
        """Finish what was asked for and stop. Idempotent."""
        ...
