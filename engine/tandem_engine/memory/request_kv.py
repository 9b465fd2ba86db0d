"""KV that one request holds: a row, pages and cursors.

tokens:   0 ........ cache_protected_len ........ kv_committed_len ........ kv_allocated_len
pages:    tree, locked     | private, content valid   | private, content pending
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from tandem_engine.base.names import PageId, ReqPoolIdx
from tandem_engine.memory.prefix_cache import NOTHING_LOADED, LoadedPages, Lock, SlowerPrefix
from tandem_engine.messages.kv_events import CacheSpace


class PendingAnchor(NamedTuple):
    """A copy of a state that a launched step makes: that has not settled, or the cache does not have the page yet."""

    length: int
    slot: int
    step: int


@dataclass(kw_only=True, slots=True, eq=False)
class RequestKv:
    """Owned by `KvMemory`, which alone changes it."""

    row: ReqPoolIdx
    space: CacheSpace
    page_size: int
    pages: list[PageId] = field(default_factory=list)
    """Pages in token order: the tree's, then private ones."""
    cache_protected_len: int = 0
    """Tokens in pages that the tree owns and this request has locked."""
    committed_len: int = 0
    """Tokens whose KV is settled: safe to send, insert or reuse."""
    computed_from: int = 0
    """Tokens before this one have KV that no step computed for this request: it was found, copied or received."""
    lock: Lock | None = None
    slower: SlowerPrefix | None = None
    """The continuation of the matched prefix in host memory, until it is loaded back or given up."""
    loaded: LoadedPages = NOTHING_LOADED
    """What was loaded back."""
    copy: int = 0
    """The newest copy that may still fill pages before `committed_len`: a reader outside the executor's order
    waits for its ack."""
    passed: list[int] = field(default_factory=list)
    """For each group of layers with a window, the leading blocks that the window has passed."""
    known_len: int = 0
    """Tokens of its prompt that the cache had when it began, those included from which it could not continue."""
    continues_from: PageId | None = None
    """Whose anchor its first step begins with, until that is launched; None without one."""
    anchor_lens: list[int] = field(default_factory=list)
    """Lengths within what it was admitted with at which its state is yet to be copied, ascending."""
    trial_lens: list[int] = field(default_factory=list)
    """The same of provisional anchors, in the order in which they get slots."""
    aimed_len: int = 0
    """The last of both. Decodes beyond it keep the newest state at which an anchor may be."""
    pending_anchors: list[PendingAnchor] = field(default_factory=list)
    """Ascending."""
    released: bool = False

    @property
    def allocated_len(self) -> int:
        """Tokens that fit in the pages held."""
        return len(self.pages) * self.page_size

    @property
    def matched_len(self) -> int:
        """Tokens that need no computing once the slower tiers' part is loaded back."""
        return self.committed_len + (self.slower.num_pages * self.page_size if self.slower is not None else 0)

    @property
    def private_pages(self) -> list[PageId]:
        return self.pages[self.cache_protected_len // self.page_size :]
