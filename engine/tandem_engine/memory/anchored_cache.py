"""The prefix cache of a model with states, whose events name what can be continued.

A prefix is continued at an anchor (`state_anchors`) and nowhere between. A router that knew all blocks would send
prompts to workers that compute them from the beginning. So a block is

    1. noted      in the tree, and no anchor is at its end or behind it
    2. announced  one is: `BlockStored`, with the blocks before it
    3. noted      the last such anchor is gone: `BlockRemoved`
    4. dropped    the tree has dropped it

The longest prefix that a router finds is then what a request can continue from, or less than the distance to the next
anchor more, for a prompt that leaves the path to one [events-promise-usable].
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem_engine.base.names import PageId
from tandem_engine.memory.radix_cache import Node, RadixCache
from tandem_engine.memory.state_anchors import StateAnchors
from tandem_engine.messages.kv_events import AllCleared, BlockRemoved, BlockStored, KvEvent


class AnchoredCache(RadixCache):
    """A `RadixCache` that is matched up to anchors, and announces what leads to them."""

    def __init__(self, page_size: int, anchors: StateAnchors) -> None:
        self._anchored = AnchoredBlocks(anchors=anchors)
        super().__init__(page_size, watcher=self._anchored, usable=anchors.usable_blocks)

    def take_events(self) -> list[KvEvent]:
        self.announce()
        return self._anchored.take()

    def snapshot_events(self) -> list[KvEvent]:
        self.announce()
        return [AllCleared(), *self._anchored.snapshot()]


@dataclass(kw_only=True, slots=True)
class _Block:
    digest: bytes
    before: PageId | None
    """The page of the block before it."""
    reasons: int = 0
    """Its own anchor, and blocks right behind it that are announced."""


@dataclass(kw_only=True, slots=True)
class AnchoredBlocks:
    """The blocks of a tree by page, and which of them are announced. Implements `TreeWatcher`."""

    anchors: StateAnchors
    _blocks: dict[PageId, _Block] = field(default_factory=dict)
    """Each behind the one before it."""
    _ends: set[PageId] = field(default_factory=set)
    """Of blocks at whose end an anchor is."""
    _events: list[KvEvent] = field(default_factory=list)

    def stored(self, node: Node, start: int, stop: int) -> None:
        parent = node.parent
        assert parent is not None, "a root has no blocks"
        before = [*parent.pages[-1:], *node.pages]
        first = len(before) - len(node.pages)
        for block, digest in enumerate(node.chain()[start:stop], start):
            at = block + first - 1
            self._blocks[node.pages[block]] = _Block(digest=digest, before=before[at] if at >= 0 else None)

    def dropping(self, leaf: Node, keep: int) -> None:
        self._follow_anchors()
        for page in reversed(leaf.pages[keep:]):
            self._end(page)
            del self._blocks[page]

    def take(self) -> list[KvEvent]:
        """Events since the last call, in order."""
        self._follow_anchors()
        taken, self._events = self._events, []
        return taken

    def snapshot(self) -> list[KvEvent]:
        """All that is announced now."""
        self._follow_anchors()
        hashes = tuple(block.digest for block in self._blocks.values() if block.reasons)
        return [BlockStored(hashes=hashes)] if hashes else []

    def _follow_anchors(self) -> None:
        for page, made in self.anchors.take_changes():
            if made:
                self._ends.add(page)
                self._announce(page)
            else:
                self._end(page)

    def _announce(self, page: PageId) -> None:
        hashes: list[bytes] = []
        at: PageId | None = page
        while at is not None:
            block = self._blocks[at]
            block.reasons += 1
            if block.reasons > 1:
                break
            hashes.append(block.digest)
            at = block.before
        self._note(hashes, BlockStored)

    def _end(self, page: PageId) -> None:
        """The anchor at the end of `page` is gone. It is known already where the tree has dropped the page."""
        if page not in self._ends:
            return
        self._ends.remove(page)
        hashes: list[bytes] = []
        at: PageId | None = page
        while at is not None:
            block = self._blocks[at]
            block.reasons -= 1
            if block.reasons:
                break
            hashes.append(block.digest)
            at = block.before
        self._note(hashes, BlockRemoved)

    def _note(self, hashes: Sequence[bytes], event: type[BlockStored] | type[BlockRemoved]) -> None:
        if hashes:
            self._events.append(event(hashes=tuple(reversed(hashes))))
