"""One node of the radix tree: a run of blocks that every request below it shares.

A block is the tokens of one page. Keys, pages and hashes are counted in blocks alone, so lengths of
different units cannot be mixed up (T27, T29).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tandem_engine.messages.block_hash import block_hash, chain_seed
from tandem_engine.names import PageId

Block = tuple[int, ...]


def whole_blocks(token_ids: Sequence[int], page_size: int) -> list[Block]:
    """The whole blocks of `token_ids`; a trailing partial one is left out."""
    bounds = pairwise(range(0, len(token_ids) + 1, page_size))
    return [tuple(token_ids[start:end]) for start, end in bounds]


@dataclass(kw_only=True, slots=True, eq=False)
class Node:
    """Children are keyed by their first block. A root has no blocks; there is one per salt."""

    salt: str
    parent: "Node | None" = None
    blocks: list[Block] = field(default_factory=list)
    pages: list[PageId] = field(default_factory=list)
    """`pages[i]` holds the KV of `blocks[i]`."""
    children: dict[Block, "Node"] = field(default_factory=dict)
    lock_count: int = 0
    """Locks on this node or below it."""
    hashes: list[bytes] = field(default_factory=list)
    """Empty until somebody asks; then one per block."""

    def __len__(self) -> int:
        return len(self.blocks)

    def lineage(self) -> Iterator["Node"]:
        """This node, its parent, … and the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def path_pages(self) -> tuple[PageId, ...]:
        """Pages from the root to the end of this node."""
        path = reversed([*self.lineage()])
        return tuple(page for node in path for page in node.pages)

    def common_blocks(self, blocks: Sequence[Block], start: int) -> int:
        """How many leading blocks of this node equal `blocks[start:]`."""
        limit = min(len(self), len(blocks) - start)
        for i in range(limit):
            if self.blocks[i] != blocks[start + i]:
                return i
        return limit

    def add_child(self, blocks: list[Block], pages: list[PageId]) -> "Node":
        child = Node(salt=self.salt, parent=self, blocks=blocks, pages=pages)
        self.children[blocks[0]] = child
        return child

    def split(self, at: int) -> "Node":
        """Move the first `at` blocks into a new parent and return it.

        This object stays the lower part: locks on it keep meaning the whole path, so the new parent
        inherits their count.
        """
        assert self.parent is not None, "a root has nothing to split"
        assert 0 < at < len(self), f"cannot split a node of {len(self)} blocks at {at}"
        upper = self.parent.add_child(self.blocks[:at], self.pages[:at])
        upper.lock_count = self.lock_count
        upper.hashes = self.hashes[:at]
        del self.blocks[:at], self.pages[:at], self.hashes[:at]
        upper.children[self.blocks[0]] = self
        self.parent = upper
        return upper

    def truncate(self, keep: int) -> list[PageId]:
        """Drop the blocks of a leaf from `keep` on, and the leaf itself when none is left. Returns their pages."""
        assert self.parent is not None, "a root has nothing to drop"
        assert not self.children, f"{len(self.children)} children would lose their prefix"
        dropped = self.pages[keep:]
        if keep == 0:
            del self.parent.children[self.blocks[0]]
        del self.blocks[keep:], self.pages[keep:], self.hashes[keep:]
        return dropped

    def chain(self) -> list[bytes]:
        """The hash of each block, chained from the salt. Ask parents before children: one level is computed."""
        if len(self.hashes) < len(self.blocks):
            parent = self.parent.last_hash() if self.parent is not None else b""
            for block in self.blocks:
                parent = block_hash(parent, block)
                self.hashes.append(parent)
        return self.hashes

    def last_hash(self) -> bytes:
        """Where the chain of a child continues."""
        return self.chain()[-1] if self.blocks else chain_seed(self.salt)
