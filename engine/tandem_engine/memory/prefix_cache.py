"""Prefix cache contract, and the cache that holds nothing.

The tree owns pages; a request uses a matched path under a `Lock` until it releases the lock. Everything is in whole
pages: keys are multiples of `page_size` tokens, and a trailing partial page is never in the tree. Matching compares
tokens, not hashes.

    tokens:  0 ............ cache_protected_len ........... kv_committed_len ....... kv_allocated_len
    pages:   tree, locked by the request | private to the request, content valid | content pending

`NoPrefixCache` is for `enable_prefix_cache=False`. A match is empty and an insert adopts nothing, so every page stays
private to its request and is released with it. `KvMemory` needs no second code path. Its locks are real, so that one
that is released twice or never is detected here as well.
"""


# ruff: noqa: ARG002 (the arguments are the contract's; this cache looks at none of them)

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tandem_engine.base.names import PageId, ReqPoolIdx
from tandem_engine.messages.kv_events import BASE_SPACE, AllCleared, CacheSpace, KvEvent


class Lock(Protocol):
    """Keeps a path from root to one node in the tree. Released exactly once [lock-released-once]."""

    @property
    def released(self) -> bool: ...


class LoadedPages(NamedTuple):
    """Where the pages of a prefix that was not on the device came from."""

    host: int
    disk: int


NOTHING_LOADED = LoadedPages(host=0, disk=0)


class SlowerPrefix(Protocol):
    """The continuation of a matched prefix in host memory. Pinned until one of the methods is called, once."""

    @property
    def num_pages(self) -> int:
        """May be 0."""
        ...

    @property
    def has_state(self) -> bool:
        """Whether the state to continue from is there, and not at an anchor on the device."""
        ...

    def load(self, pages: Sequence[PageId], row: ReqPoolIdx | None = None) -> LoadedPages:
        """The request is admitted: queue the copy to device `pages`, `num_pages` of them, and of the state to `row`;
        None: it gets its state otherwise."""
        ...

    def release(self) -> None:
        """The request is not admitted after all."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MatchResult:
    """The longest cached prefix."""

    pages: tuple[PageId, ...]
    """`len(pages) * page_size` tokens are cached."""
    lock: Lock
    """The path is locked by the match itself, so nothing can evict it between matching and using it."""
    slower: SlowerPrefix | None = None
    """From a cache with slower tiers."""
    known: int = 0
    """Blocks that the cache has, those after `pages` included, which a request cannot continue from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InsertResult:
    """What became of the pages offered to `insert`."""

    duplicates: tuple[PageId, ...]
    """Offered pages whose tokens the tree already held in *other* pages. They stay the caller's."""
    pages: tuple[PageId, ...]
    """The tree's pages for the key, offered ones where they were adopted. () from a cache that adopts nothing."""
    lock: Lock
    """A lock on the path of those pages."""


class PrefixCache(Protocol):
    """Maps token prefixes to pages. Used by the scheduler thread only."""

    def match(
        self, token_ids: Sequence[int], *, space: CacheSpace = BASE_SPACE, max_tokens: int | None = None
    ) -> MatchResult:
        """Lock and return the longest cached prefix of at most `max_tokens` tokens (page multiples)."""
        ...

    def peek(self, token_ids: Sequence[int], *, space: CacheSpace = BASE_SPACE, max_tokens: int | None = None) -> int:
        """How many pages `match` would return. Changes nothing, not even recency."""
        ...

    def peek_after(self, lock: Lock, token_ids: Sequence[int]) -> int:
        """How many pages the cache has for `token_ids` after the path that `lock` covers. Changes nothing."""
        ...

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[PageId], *, space: CacheSpace = BASE_SPACE
    ) -> InsertResult:
        """Add the whole pages of `token_ids`. `pages[i]` holds tokens [i*page_size, (i+1)*page_size).

        Pages that equal the tree's own at the same position (the pinned prefix) are neither
        duplicates nor adopted twice. `len(token_ids)` must be a multiple of `page_size`.
        """
        ...

    def extend(self, lock: Lock, token_ids: Sequence[int], pages: Sequence[PageId]) -> InsertResult:
        """`insert` of what follows the path that `lock` covers; work does not grow with that path's length.

        `token_ids`, `pages` and the result's pages are those after the path. The result's lock takes the
        place of `lock`, which counts as given back.
        """
        ...

    def unlock(self, lock: Lock, *, spent: bool = False) -> None:
        """Give a lock back. A second time is a bug and raises AssertionError.

        `spent`: the user of the path continues with a copy elsewhere. `evict` takes the end of the path first, up to
        where another path branches off or another lock holds it.
        """
        ...

    def evict(self, num_pages: int) -> list[PageId]:
        """Remove the `num_pages` least recently used unlocked pages, or all there are, and return them."""
        ...

    def evictable_pages(self) -> int:
        """Pages that `evict` could return now."""
        ...

    def shared_pages(self, lock: Lock) -> int:
        """Pages, from the start of the locked path, that another lock covers too: they stay when `lock` is released."""
        ...

    def pages(self) -> Iterator[PageId]:
        """Every page the tree owns (audit)."""
        ...

    def clear(self) -> list[PageId]:
        """Drop every unlocked node and return its pages."""
        ...

    def take_events(self) -> list[KvEvent]:
        """KV events since the last call, in order."""
        ...

    def snapshot_events(self) -> list[KvEvent]:
        """`AllCleared` and then every block, parents first: the whole content for a replay."""
        ...

    def audit(self, locks: Iterable[Lock]) -> list[str]:
        """What is wrong with the bookkeeping if exactly `locks` are out; one sentence each."""
        ...


class EmptyLock:
    """Locks an empty path."""

    def __init__(self) -> None:
        self.released = False


class NoPrefixCache:
    """Implements `PrefixCache`."""

    def __init__(self) -> None:
        self._locks: set[Lock] = set()

    def match(
        self, token_ids: Sequence[int], *, space: CacheSpace = BASE_SPACE, max_tokens: int | None = None
    ) -> MatchResult:
        return MatchResult(pages=(), lock=self._lock())

    def peek(self, token_ids: Sequence[int], *, space: CacheSpace = BASE_SPACE, max_tokens: int | None = None) -> int:
        return 0

    def peek_after(self, lock: Lock, token_ids: Sequence[int]) -> int:
        return 0

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[PageId], *, space: CacheSpace = BASE_SPACE
    ) -> InsertResult:
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
