"""Prefix cache that never holds anything, for `enable_prefix_cache=False`.

A match is empty and an insert adopts nothing, so every page stays private to its request and goes
straight back to the allocator with it. `KvMemory` needs no second code path. Locks are real, so that
one given back twice or never is found here as well.
"""
# ruff: noqa: ARG002 (the arguments are the contract's; this cache looks at none of them)

from collections.abc import Iterable, Iterator, Sequence

from tandem_engine.memory.prefix_cache import InsertResult, Lock, MatchResult
from tandem_engine.messages.kv_events import AllCleared, KvEvent
from tandem_engine.names import PageId


class EmptyLock:
    """Locks an empty path."""

    def __init__(self) -> None:
        self.released = False


class NoPrefixCache:
    """Implements `PrefixCache`."""

    def __init__(self) -> None:
        self._locks: set[Lock] = set()

    def match(self, token_ids: Sequence[int], *, salt: str = "", max_tokens: int | None = None) -> MatchResult:
        return MatchResult(pages=(), lock=self._lock())

    def peek(self, token_ids: Sequence[int], *, salt: str = "", max_tokens: int | None = None) -> int:
        return 0

    def peek_after(self, lock: Lock, token_ids: Sequence[int]) -> int:
        return 0

    def insert(self, token_ids: Sequence[int], pages: Sequence[PageId], *, salt: str = "") -> InsertResult:
        return InsertResult(duplicates=(), pages=(), lock=self._lock())

    def extend(self, lock: Lock, token_ids: Sequence[int], pages: Sequence[PageId]) -> InsertResult:
        self.unlock(lock)
        return InsertResult(duplicates=(), pages=(), lock=self._lock())

    def unlock(self, lock: Lock, *, spent: bool = False) -> None:
        assert isinstance(lock, EmptyLock), f"{lock!r} is not a lock of this cache"
        assert not lock.released, "lock released twice [lock-released-once]"
        lock.released = True
        self._locks.remove(lock)

    def evict(self, num_pages: int) -> list[PageId]:
        return []

    def evictable_pages(self) -> int:
        return 0

    def shared_pages(self, lock: Lock) -> int:
        return 0

    def pages(self) -> Iterator[PageId]:
        return iter(())

    def clear(self) -> list[PageId]:
        return []

    def take_events(self) -> list[KvEvent]:
        return []

    def snapshot_events(self) -> list[KvEvent]:
        return [AllCleared()]

    def audit(self, locks: Iterable[Lock]) -> list[str]:
        held = {*locks}
        if held == self._locks:
            return []
        return [f"{len(self._locks)} locks are out, requests hold {len(held)}"]

    def _lock(self) -> EmptyLock:
        lock = EmptyLock()
        self._locks.add(lock)
        return lock
