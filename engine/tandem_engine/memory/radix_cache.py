"""Prefix cache as a radix tree over whole pages.

Life of a cached page
    1. insert     a request offers settled pages; those the tree lacks become a new leaf
    2. locked     the lock that `insert` or `match` returned covers the path from the root to its node
    3. unlocked   the last lock is given back; the node joins the recency list
    4. evict      from the oldest leaf's end, page by page, back to the allocator

Recency without a scan (T32). Every unlocked node stands in one ordered list, oldest first. A lock
takes its path out of the list, and giving it back appends the path again, deepest node first. So a
child always stands before its parent, the head of the list is always a leaf, and eviction looks at
nothing but the head. There are no timestamps.

A salt has its own root: requests with different salts share nothing.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem_engine.memory.prefix_cache import InsertResult, Lock, MatchResult
from tandem_engine.memory.radix_node import Block, Node, whole_blocks
from tandem_engine.messages.kv_events import AllCleared, BlockRemoved, BlockStored, KvEvent
from tandem_engine.names import PageId


@dataclass(slots=True, eq=False)
class PathLock:
    """Locks `node` and everything above it."""

    node: Node
    released: bool = False


class Reach(NamedTuple):
    """How far a key goes down the tree."""

    node: Node
    """The deepest node that shares at least one block with the key; the root if none does."""
    within: int
    """Blocks of `node` that the key shares."""
    blocks: int
    """Blocks of the key that the tree has."""


class RadixCache:
    """Implements `PrefixCache`."""

    def __init__(self, page_size: int, *, emit_events: bool = True) -> None:
        self._page_size = page_size
        self._emit_events = emit_events
        self._roots: dict[str, Node] = {}
        self._unlocked: OrderedDict[Node, None] = OrderedDict()
        self._evictable = 0
        self._events: list[KvEvent] = []

    def match(self, token_ids: Sequence[int], *, salt: str = "", max_tokens: int | None = None) -> MatchResult:
        reach = self._reach(self._root(salt), self._key(token_ids, max_tokens))
        node = self._node_ending_at(reach)
        return MatchResult(pages=node.path_pages(), lock=self._lock(node))

    def peek(self, token_ids: Sequence[int], *, salt: str = "", max_tokens: int | None = None) -> int:
        root = self._roots.get(salt)
        return 0 if root is None else self._reach(root, self._key(token_ids, max_tokens)).blocks

    def insert(self, token_ids: Sequence[int], pages: Sequence[PageId], *, salt: str = "") -> InsertResult:
        key = whole_blocks(token_ids, self._page_size)
        assert len(pages) * self._page_size == len(token_ids), (
            f"{len(pages)} pages of {self._page_size} cannot hold exactly {len(token_ids)} tokens"
        )
        reach = self._reach(self._root(salt), key)
        node = self._node_ending_at(reach)
        known = node.path_pages()
        if reach.blocks < len(key):
            node = self._add_leaf(node, key[reach.blocks :], list(pages[reach.blocks :]))
        return InsertResult(
            duplicates=tuple(page for mine, page in zip(known, pages, strict=False) if mine != page),
            pages=(*known, *pages[reach.blocks :]),
            lock=self._lock(node),
        )

    def unlock(self, lock: Lock) -> None:
        assert isinstance(lock, PathLock), f"{lock!r} is not a lock of this cache"
        assert not lock.released, f"lock on {len(lock.node)} blocks released twice (T26)"
        lock.released = True
        for node in lock.node.lineage():
            assert node.lock_count > 0, f"lock count of a node with pages {node.pages} would go negative"
            node.lock_count -= 1
            if node.lock_count == 0:
                self._expose(node)

    def evict(self, num_pages: int) -> list[PageId]:
        evicted: list[PageId] = []
        while len(evicted) < num_pages and self._unlocked:
            oldest = next(iter(self._unlocked))
            evicted += self._trim(oldest, num_pages - len(evicted))
        return evicted

    def evictable_pages(self) -> int:
        return self._evictable

    def pages(self) -> Iterator[PageId]:
        for node in self._nodes():
            yield from node.pages

    def clear(self) -> list[PageId]:
        return self.evict(self._evictable)

    def take_events(self) -> list[KvEvent]:
        taken, self._events = self._events, []
        return taken

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
            problems.append(f"{evictable} tree pages are evictable, the counter says {self._evictable}")
        return problems

    def _key(self, token_ids: Sequence[int], max_tokens: int | None) -> list[Block]:
        if max_tokens is None:
            return whole_blocks(token_ids, self._page_size)
        assert max_tokens >= 0, f"cannot match at most {max_tokens} tokens"
        return whole_blocks(token_ids[:max_tokens], self._page_size)

    def _root(self, salt: str) -> Node:
        """Roots exist while they have a child or a lock; `_expose` and `_trim` drop them."""
        return self._roots.setdefault(salt, Node(salt=salt))

    def _reach(self, root: Node, key: list[Block]) -> Reach:
        reach = Reach(root, 0, 0)
        while reach.within == len(reach.node) and reach.blocks < len(key):
            child = reach.node.children.get(key[reach.blocks])
            if child is None:
                break
            shared = child.common_blocks(key, reach.blocks)
            reach = Reach(child, shared, reach.blocks + shared)
        return reach

    def _node_ending_at(self, reach: Reach) -> Node:
        """Make the shared part a node of its own. The caller locks it in the same call.

        Until then an unlocked new parent may stand in the recency list out of order.
        """
        if reach.within == len(reach.node):
            return reach.node
        upper = reach.node.split(reach.within)
        if upper.lock_count == 0:
            self._unlocked[upper] = None
        return upper

    def _add_leaf(self, parent: Node, blocks: list[Block], pages: list[PageId]) -> Node:
        leaf = parent.add_child(blocks, pages)
        self._expose(leaf)
        if self._emit_events:
            self._events.append(BlockStored(hashes=tuple(leaf.chain())))
        return leaf

    def _lock(self, node: Node) -> PathLock:
        for locked in node.lineage():  # the node itself first (T25)
            if locked.lock_count == 0 and locked in self._unlocked:
                del self._unlocked[locked]
                self._evictable -= len(locked)
            locked.lock_count += 1
        return PathLock(node)

    def _expose(self, node: Node) -> None:
        """`node` has no lock any more: eviction may have it, as the most recently used."""
        if node.parent is None:
            self._drop_if_unused(node)
            return
        self._unlocked[node] = None
        self._evictable += len(node)

    def _trim(self, leaf: Node, at_most: int) -> list[PageId]:
        """Take up to `at_most` pages from the end of `leaf`: never more than were asked for (T57)."""
        parent, keep = leaf.parent, max(0, len(leaf) - at_most)
        assert parent is not None, "roots are never in the recency list"
        if self._emit_events:
            self._events.append(BlockRemoved(hashes=tuple(leaf.chain()[keep:])))
        pages = leaf.truncate(keep)
        self._evictable -= len(pages)
        if keep == 0:
            del self._unlocked[leaf]
            self._drop_if_unused(parent)
        return pages

    def _drop_if_unused(self, node: Node) -> None:
        """Salts are chosen by clients: a root that outlived its content would leak (one per salt)."""
        if node.parent is None and not node.children and node.lock_count == 0:
            del self._roots[node.salt]

    def _nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        pending = [child for root in self._roots.values() for child in root.children.values()]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())
