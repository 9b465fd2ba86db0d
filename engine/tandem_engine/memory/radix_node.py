"""One node of the radix tree: a run of blocks that every request below it shares.

A block is the tokens of one page. Keys, pages and hashes are counted in blocks alone, so lengths of
different units cannot be mixed up [whole-pages] [one-length-unit].

    key      bytes of the packed tokens, block after block
    pages    one per block
    hashes   one per block, as far as anybody asked

A key is bytes and not tuples of ints, because bytes are compared and hashed by one call in C: a prompt of
32k tokens against a cached one costs a memcmp, and where they differ is found by halving. It is a bytearray,
so that a leaf grows and shrinks at its end without copying the rest.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from tandem_engine.messages.block_hash import chain_packed, chain_seed
from tandem_engine.names import PageId


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
    """Children are keyed by their first block. A root has no blocks; there is one per salt."""

    salt: str
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
    """Requests that were admitted with this node in their prefix. Counted by whoever needs it."""
    hashes: list[bytes] = field(default_factory=list)
    """Empty until somebody asks; then one per block."""

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def first_block(self) -> bytes:
        """What the parent knows this node by."""
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
        child = Node(salt=self.salt, block_bytes=self.block_bytes, parent=self, key=bytearray(key), pages=pages)
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
        """The hash of each block, chained from the salt. Ask parents before children: one level is computed."""
        known = len(self.hashes)
        if known < len(self.pages):
            assert self.parent is not None, "a root has nothing to hash"
            before = self.hashes[-1] if self.hashes else self.parent.last_hash()
            self.hashes += chain_packed(self.key[known * self.block_bytes :], self.block_bytes, parent=before)
        return self.hashes

    def last_hash(self) -> bytes:
        """Where the chain of a child continues."""
        return self.chain()[-1] if self.pages else chain_seed(self.salt)
