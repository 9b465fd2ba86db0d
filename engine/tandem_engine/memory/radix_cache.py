"""Prefix cache as a radix tree over whole pages.

    1. insert     a request offers committed pages; those that the tree lacks become a new leaf
    2. locked     the lock that `insert` or `match` returned covers the path from the root to its node
    3. unlocked   the last lock is released; the node joins the recency list as the youngest, or as the oldest if spent
    4. evict      from the end of the oldest leaf, page by page, back to the allocator

Every unlocked node is in one list, oldest first. A lock takes its path out, and its release appends the path again,
deepest node first. So a child is always before its parent, the head of the list is a leaf, and eviction reads only the
head, without timestamps [evict-without-scan]. A spent path goes to the head in the same order, as far as nothing else
is below it. Each cache space has a root: requests in different spaces share nothing.

A `Node` is a run of blocks that every request below it shares. A block is the tokens of one page, and keys, pages and
hashes are counted in blocks, so lengths of different units cannot be mixed up [whole-pages] [one-length-unit].

    key      bytes of the packed tokens, block after block
    pages    one per block
    hashes   one per block, computed on demand

Keys are bytes, not tuples of ints, because one call in C compares or hashes them: a cached prompt of 32k tokens costs a
memcmp, and bisection finds the first difference. A bytearray lets a leaf grow and shrink at its end without a copy.

Work is proportional to what is new. A key is packed only as far as the tree has something to compare it with, a running
request extends its locked path (and the leaf itself if no other request uses it), and blocks are hashed only when
their events are taken.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol

from tandem_engine.base.names import PageId
from tandem_engine.memory.prefix_cache import InsertResult, Lock, MatchResult
from tandem_engine.messages.kv_events import (
    BASE_SPACE,
    TOKEN_BYTES,
    AllCleared,
    BlockRemoved,
    BlockStored,
    CacheSpace,
    KvEvent,
    chain_packed,
    pack_tokens,
)


def shared_blocks(one: bytes | bytearray, other: bytes | bytearray, block_bytes: int) -> int:
    """How many leading blocks of two keys are equal. By halving: a few comparisons of long runs."""
    alike, limit = 0, min(len(one), len(other)) // block_bytes
    middle = limit  # most often all of it
    while alike < limit:
        start, end = alike * block_bytes, middle * block_bytes
        if one[start:end] == other[start:end]:
            alike = middle
        else:
            limit = middle - 1
        middle = (alike + limit + 1) // 2
    return alike


@dataclass(kw_only=True, slots=True, eq=False)
class Node:
    """Children are keyed by their first block. A root has no blocks; there is one per cache space."""

    space: CacheSpace
    block_bytes: int
    """Of one packed block."""
    parent: "Node | None" = None
    key: bytearray = field(default_factory=bytearray)
    pages: list[PageId] = field(default_factory=list)
    """`pages[i]` holds the KV of block i."""
    children: dict[bytes, "Node"] = field(default_factory=dict)
    lock_count: int = 0
    """Locks on this node or below it."""
    hits: int = 0
    """Requests that were admitted with this node in their prefix. Counted by the watcher that needs it."""
    hashes: list[bytes] = field(default_factory=list)
    """Empty until first needed; then one per block."""

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def first_block(self) -> bytes:
        """The parent's key for this node."""
        return bytes(self.key[: self.block_bytes])

    def lineage(self, stop: "Node | None" = None) -> Iterator["Node"]:
        """This node, its parent, … and the root, or the last one below `stop`."""
        node: Node | None = self
        while node is not stop and node is not None:
            yield node
            node = node.parent

    def path_pages(self, stop: "Node | None" = None) -> tuple[PageId, ...]:
        """Pages from the root, or from the end of `stop`, to the end of this node."""
        path = reversed([*self.lineage(stop)])
        return tuple(chain.from_iterable(node.pages for node in path))

    def common_blocks(self, key: bytes) -> int:
        """How many leading blocks of this node equal those of `key`."""
        return shared_blocks(self.key, key, self.block_bytes)

    def add_child(self, key: bytes | bytearray, pages: list[PageId]) -> "Node":
        child = Node(space=self.space, block_bytes=self.block_bytes, parent=self, key=bytearray(key), pages=pages)
        self.children[child.first_block] = child
        return child

    def grow(self, key: bytes, pages: list[PageId]) -> None:
        """Append blocks to a leaf."""
        assert self.parent is not None, "a root holds no blocks"
        assert not self.children, f"{len(self.children)} children would change their prefix"
        self.key += key
        self.pages += pages

    def split(self, at: int) -> "Node":
        """Move the first `at` blocks into a new parent and return it.

        This object stays the lower part: locks on it keep meaning the whole path, so the new parent
        inherits their count.
        """
        assert self.parent is not None, "a root has nothing to split"
        assert 0 < at < len(self), f"cannot split a node of {len(self)} blocks at {at}"
        cut = at * self.block_bytes
        upper = self.parent.add_child(self.key[:cut], self.pages[:at])
        upper.lock_count = self.lock_count
        upper.hits = self.hits
        upper.hashes = self.hashes[:at]
        del self.key[:cut], self.pages[:at], self.hashes[:at]
        upper.children[self.first_block] = self
        self.parent = upper
        return upper

    def truncate(self, keep: int) -> list[PageId]:
        """Drop the blocks of a leaf from `keep` on, and the leaf itself when none is left. Returns their pages."""
        assert self.parent is not None, "a root has nothing to drop"
        assert not self.children, f"{len(self.children)} children would lose their prefix"
        dropped = self.pages[keep:]
        if keep == 0:
            del self.parent.children[self.first_block]
        del self.key[keep * self.block_bytes :], self.pages[keep:], self.hashes[keep:]
        return dropped

    def chain(self) -> list[bytes]:
        """The hash of each block, chained from the seed of its space. Ask parents before children: one level is
        computed."""
        known = len(self.hashes)
        if known < len(self.pages):
            assert self.parent is not None, "a root has nothing to hash"
            before = self.hashes[-1] if self.hashes else self.parent.last_hash()
            self.hashes += chain_packed(self.key[known * self.block_bytes :], self.block_bytes, parent=before)
        return self.hashes

    def last_hash(self) -> bytes:
        """Where the chain of a child continues."""
        return self.chain()[-1] if self.pages else self.space.seed


@dataclass(slots=True, eq=False)
class PathLock:
    """Locks `node` and everything above it."""

    node: Node
    released: bool = False


class TreeWatcher(Protocol):
    """Notified of every block that enters or leaves a tree, in place of events. It must not change the tree."""

    def stored(self, node: Node, start: int, stop: int) -> None:
        """Blocks [start, stop) of `node` are new. Called by `announce`, before they move or are evicted."""
        ...

    def dropping(self, leaf: Node, keep: int) -> None:
        """The blocks of `leaf` from `keep` on are about to go; they are still there."""
        ...


class Reach(NamedTuple):
    """How far tokens go down the tree from a node."""

    node: Node
    """The deepest node that shares at least one block with them; the one they start from if none does."""
    within: int
    """Blocks of `node` that they share."""
    blocks: int
    """Blocks of theirs that the tree has."""


class Unannounced(NamedTuple):
    """Blocks [start, stop) of `node` that no event has named yet."""

    node: Node
    start: int
    stop: int


class RadixCache:
    """Implements `PrefixCache`."""

    def __init__(
        self,
        page_size: int,
        *,
        emit_events: bool = True,
        watcher: TreeWatcher | None = None,
        usable: Callable[[Sequence[PageId]], int] | None = None,
    ) -> None:
        """With a `watcher` the tree notifies it instead of creating events.

        `usable`: the most leading blocks of a path, on these pages, after which a request can continue; None: all.
        """
        self._page_size = page_size
        self._usable = usable
        self._emit_events = emit_events
        self._watcher = watcher
        self._roots: dict[CacheSpace, Node] = {}
        self._unlocked: OrderedDict[Node, None] = OrderedDict()
        self._evictable = 0
        self._events: list[KvEvent] = []
        self._unannounced: list[Unannounced] = []

    def match(
        self, token_ids: Sequence[int], *, space: CacheSpace = BASE_SPACE, max_tokens: int | None = None
    ) -> MatchResult:
        reach, known = self._usable_reach(self._root(space), token_ids, self._blocks(token_ids, max_tokens))
        node = self._node_ending_at(reach)
        return MatchResult(pages=node.path_pages(), lock=self._lock(node), known=known)

    def match_blocks(self, token_ids: Sequence[int], *, space: CacheSpace, blocks: int) -> MatchResult:
        """Lock and return `blocks` blocks, which the tree has, whether or not a request can continue there."""
        node = self._node_ending_at(self._reach(self._root(space), token_ids, blocks))
        return MatchResult(pages=node.path_pages(), lock=self._lock(node), known=blocks)

    def peek(self, token_ids: Sequence[int], *, space: CacheSpace = BASE_SPACE, max_tokens: int | None = None) -> int:
        root = self._roots.get(space)
        if root is None:
            return 0
        return self._usable_reach(root, token_ids, self._blocks(token_ids, max_tokens))[0].blocks

    def peek_after(self, lock: Lock, token_ids: Sequence[int]) -> int:
        return self._reach(self._held(lock).node, token_ids, self._blocks(token_ids, None)).blocks

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[PageId], *, space: CacheSpace = BASE_SPACE
    ) -> InsertResult:
        return self.extend(self._lock(self._root(space)), token_ids, pages)

    def extend(self, lock: Lock, token_ids: Sequence[int], pages: Sequence[PageId]) -> InsertResult:
        path = self._held(lock)
        assert len(pages) * self._page_size == len(token_ids), (
            f"{len(pages)} pages of {self._page_size} cannot hold exactly {len(token_ids)} tokens"
        )
        start = path.node
        reach = self._reach(start, token_ids, len(pages))
        node = self._node_ending_at(reach)
        known = node.path_pages(start)
        if reach.blocks < len(pages):
            key = pack_tokens(token_ids[reach.blocks * self._page_size :])
            node = self._store(node, key, list(pages[reach.blocks :]), grow=node is start)
        return InsertResult(
            duplicates=tuple(page for mine, page in zip(known, pages, strict=False) if mine != page),
            pages=(*known, *pages[reach.blocks :]),
            lock=self._move(path, node),
        )

    def unlock(self, lock: Lock, *, spent: bool = False) -> None:
        path = self._held(lock)
        path.released = True
        for node in path.node.lineage():
            assert node.lock_count > 0, f"lock count of a node with pages {node.pages} would go negative"
            node.lock_count -= 1
            if node.lock_count == 0:
                self._expose(node)
        if spent:
            self._age(path.node)

    def evict(self, num_pages: int) -> list[PageId]:
        evicted: list[PageId] = []
        while len(evicted) < num_pages and self._unlocked:
            oldest = next(iter(self._unlocked))
            evicted += self._trim(oldest, num_pages - len(evicted))
        return evicted

    def evictable_pages(self) -> int:
        return self._evictable

    def shared_pages(self, lock: Lock) -> int:
        return sum(len(node) for node in self._held(lock).node.lineage() if node.lock_count > 1)

    def pages(self) -> Iterator[PageId]:
        for node in self._nodes():
            yield from node.pages

    def clear(self) -> list[PageId]:
        return self.evict(self._evictable)

    def take_events(self) -> list[KvEvent]:
        self.announce()
        taken, self._events = self._events, []
        return taken

    def announce(self) -> None:
        """Turn what was stored into events, or notify the watcher. In order, so parents are hashed before children."""
        noted, self._unannounced = self._unannounced, []
        if self._watcher is None:
            self._events += (BlockStored(hashes=tuple(node.chain()[start:stop])) for node, start, stop in noted)
            return
        for node, start, stop in noted:
            self._watcher.stored(node, start, stop)

    def snapshot_events(self) -> list[KvEvent]:
        stored = (BlockStored(hashes=tuple(node.chain())) for node in self._nodes())
        return [AllCleared(), *stored]

    def audit(self, locks: Iterable[Lock]) -> list[str]:
        """O(tree). Counts again, from the locks and the nodes, what the methods above keep up to date."""
        expected = Counter(node for lock in locks if isinstance(lock, PathLock) for node in lock.node.lineage())
        nodes = [*self._nodes()]
        problems = [
            f"tree node with pages {node.pages[:4]} counts {node.lock_count} locks, requests hold {held}"
            for node in (*self._roots.values(), *nodes)
            if node.lock_count != (held := expected[node])
        ]
        unlocked = {node for node in nodes if node.lock_count == 0}
        if unlocked != self._unlocked.keys():
            problems.append(f"{len(unlocked)} unlocked tree nodes, {len(self._unlocked)} in the recency list")
        if (evictable := sum(len(node) for node in unlocked)) != self._evictable:
            problems.append(f"{evictable} tree pages are evictable, the counter is {self._evictable}")
        return problems

    def _blocks(self, token_ids: Sequence[int], max_tokens: int | None) -> int:
        """Whole blocks of `token_ids` that may be matched; a trailing partial one is left out."""
        if max_tokens is None:
            return len(token_ids) // self._page_size
        assert max_tokens >= 0, f"cannot match at most {max_tokens} tokens"
        return min(len(token_ids), max_tokens) // self._page_size

    def _root(self, space: CacheSpace) -> Node:
        """Roots exist while they have a child or a lock; `_expose` and `_trim` drop them."""
        root = self._roots.get(space)
        if root is None:
            root = self._roots[space] = Node(space=space, block_bytes=self._page_size * TOKEN_BYTES)
        return root

    def _usable_reach(self, root: Node, token_ids: Sequence[int], blocks: int) -> tuple[Reach, int]:
        """As `_reach`, as far as a request can continue; and the blocks that the tree has."""
        reach = self._reach(root, token_ids, blocks)
        if self._usable is None or not reach.blocks:
            return reach, reach.blocks
        assert reach.node.parent is not None, "a root has no blocks"
        usable = self._usable((*reach.node.parent.path_pages(), *reach.node.pages[: reach.within]))
        return reach if usable == reach.blocks else self._reach(root, token_ids, usable), reach.blocks

    def _reach(self, start: Node, token_ids: Sequence[int], blocks: int) -> Reach:
        """Follow the first `blocks` blocks of `token_ids` from the end of `start`, packing what is compared."""
        size = self._page_size
        node, within, reached = start, len(start), 0
        while within == len(node) and reached < blocks:
            first = reached * size
            child = node.children.get(pack_tokens(token_ids[first : first + size]))
            if child is None:
                break
            last = first + min(len(child), blocks - reached) * size
            node, within = child, child.common_blocks(pack_tokens(token_ids[first:last]))
            reached += within
        return Reach(node, within, reached)

    def _node_ending_at(self, reach: Reach) -> Node:
        """Make the shared part a node of its own. The caller locks it in the same call.

        Until then an unlocked new parent may stand in the recency list out of order.
        """
        if reach.within == len(reach.node):
            return reach.node
        self.announce()  # while the blocks still stand where they were noted
        upper = reach.node.split(reach.within)
        if upper.lock_count == 0:
            self._unlocked[upper] = None
        return upper

    def _store(self, parent: Node, key: bytes, pages: list[PageId], *, grow: bool) -> Node:
        """Add blocks below `parent`; in it, if `grow` and its only lock is the caller's: chunks make no chain."""
        if grow and parent.parent is not None and not parent.children and parent.lock_count == 1:
            node, start = parent, len(parent)
            node.grow(key, pages)
        else:
            node, start = parent.add_child(key, pages), 0
            self._expose(node)
        if self._emit_events:
            self._unannounced.append(Unannounced(node, start, len(node)))
        return node

    def _held(self, lock: Lock) -> PathLock:
        assert isinstance(lock, PathLock), f"{lock!r} is not a lock of this cache"
        assert not lock.released, f"lock on {len(lock.node)} blocks released twice [lock-released-once]"
        return lock

    def _lock(self, node: Node) -> PathLock:
        self._lock_path(node, None)
        return PathLock(node)

    def _move(self, path: PathLock, node: Node) -> PathLock:
        """Exchange a lock for one that reaches further down, to `node`."""
        self._lock_path(node, path.node)
        path.released = True
        return PathLock(node)

    def _lock_path(self, node: Node, stop: Node | None) -> None:
        for locked in node.lineage(stop):  # the node itself first [lock-covers-node]
            if locked.lock_count == 0 and locked in self._unlocked:
                del self._unlocked[locked]
                self._evictable -= len(locked)
            locked.lock_count += 1

    def _expose(self, node: Node) -> None:
        """`node` has no lock any more: eviction may have it, as the most recently used."""
        if node.parent is None:
            self._drop_if_unused(node)
            return
        self._unlocked[node] = None
        self._evictable += len(node)

    def _age(self, leaf: Node) -> None:
        """Evict first what ends only in `leaf`: not what is locked, nor what another path continues."""
        spent: list[Node] = []
        for node in leaf.lineage():
            if node not in self._unlocked or len(node.children) > bool(spent):
                break
            spent.append(node)
        for node in reversed(spent):
            self._unlocked.move_to_end(node, last=False)

    def _trim(self, leaf: Node, at_most: int) -> list[PageId]:
        """Take up to `at_most` pages from the end of `leaf`: never more than requested [evict-exact]."""
        parent, keep = leaf.parent, max(0, len(leaf) - at_most)
        assert parent is not None, "roots are never in the recency list"
        self.announce()
        if self._watcher is not None:
            self._watcher.dropping(leaf, keep)
        elif self._emit_events:
            self._events.append(BlockRemoved(hashes=tuple(leaf.chain()[keep:])))
        pages = leaf.truncate(keep)
        self._evictable -= len(pages)
        if keep == 0:
            del self._unlocked[leaf]
            self._drop_if_unused(parent)
        return pages

    def _drop_if_unused(self, node: Node) -> None:
        """Salts are chosen by clients: a root that outlived its content would leak (one per space)."""
        if node.parent is None and not node.children and node.lock_count == 0:
            del self._roots[node.space]

    def _nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        pending = [child for root in self._roots.values() for child in root.children.values()]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())
