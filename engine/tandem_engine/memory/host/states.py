"""The tiers of a model with states: a cached prefix continues at an anchor on the device, or at a state in host memory.

    1. anchored    on the device, at the end of a block (`state_anchors`)
    2. backup      as of blocks, by policy: when it is made, when a request has used it, or when it leaves
    3. both        either may lose its copy
    4. host only   a match ends at the deepest state of both, over what device and host have of the prefix
    5. load-back   blocks to pages; the state to the row of the request, whose first step copies it to an anchor

A state leaves the device when its block does, or when another anchor gets its slot; then the blocks may stay. In host
memory it is parts of a page's size (`pages`), which are stored and read like blocks. A match pins all parts of a state,
and a state is there when all of them are. Provisional anchors, which no request has used, are in no tier but the
device.

Events name blocks in every tier, whether or not a state is behind them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from tandem_engine.base.names import PageId, ReqPoolIdx
from tandem_engine.config import WritePolicy
from tandem_engine.memory.host.pages import HostBlock, state_keys
from tandem_engine.memory.host.tier import Candidate, HostTier
from tandem_engine.memory.host.tiered_cache import HostPrefix, TieredCache, candidates_of
from tandem_engine.memory.page_copies import CopyKind, PageCopy
from tandem_engine.memory.prefix_cache import LoadedPages, MatchResult
from tandem_engine.memory.radix_cache import Node, PathLock
from tandem_engine.memory.state_anchors import StateAnchors
from tandem_engine.messages.kv_events import BASE_SPACE, CacheSpace


@dataclass(kw_only=True, slots=True)
class StateBackups:
    """States in host memory, each as the parts that follow a block. Scheduler thread only."""

    host: HostTier
    _outgoing: list[tuple[int, HostBlock]] = field(default_factory=list)
    """Numbers of parts on the device (`page_copies`), and where they go."""

    def find(self, digest: bytes, tokens: bytes) -> list[HostBlock] | None:
        """The state after a block, if it can be loaded back."""
        parts = []
        for key in self._keys(digest):
            part = self.host.find(key, tokens)
            if part is None:
                # Most blocks have no state: its first part is all that is looked up, of maybe thousands.
                return None
            parts.append(part)
        return parts

    def prepare(self, candidate: Candidate, slot: int) -> None:
        """Give the state in `slot`, which is that after `candidate`, host pages for what host memory lacks of it.

        `queue` must follow before the slot is given to another anchor.
        """
        kept, outgoing = [], []
        for part, key in enumerate(self._keys(candidate.digest)):
            block = self.host.blocks.get(key)
            if block is None:
                page = self.host.take_page()
                if page is None:
                    break
                block = HostBlock(digest=key, tokens=candidate.tokens, page=page)
                self.host.blocks.add(block)
                outgoing.append((slot * self.host.state_pages + part, block))
            else:
                # No part makes room for another one.
                self.host.blocks.pin(block)
                kept.append(block)
        self.host.unpin(kept)
        if len(kept) + len(outgoing) == self.host.state_pages:
            self._outgoing += outgoing
        else:
            for _, block in outgoing:
                self.host.discard(block)

    def queue(self) -> None:
        """One copy for all that was prepared."""
        if not self._outgoing:
            return
        outgoing, self._outgoing = self._outgoing, []
        blocks = [block for _, block in outgoing]
        copy = PageCopy(
            kind=CopyKind.STATE_TO_HOST,
            source=[number for number, _ in outgoing],
            target=[block.page for block in blocks],
        )
        self.host.copies.launch(copy, partial(self._backed_up, blocks), of_anchors=True)

    def load(self, parts: Sequence[HostBlock], row: ReqPoolIdx) -> None:
        """Queue the copy of `parts`, which the caller has pinned, to the state of `row`. Its ack unpins them."""
        first = row * self.host.state_pages
        copy = PageCopy(
            kind=CopyKind.HOST_TO_STATE,
            source=[part.page for part in parts],
            target=range(first, first + self.host.state_pages),
        )
        self.host.copies.launch(copy, partial(self.host.unpin, parts))

    def is_anywhere(self, digest: bytes) -> bool:
        """Whether all parts are in host memory, or in storage, or on their way from there."""
        return all(self.host.has(key) for key in self._keys(digest))

    def wanted_soon(self, digest: bytes, tokens: bytes) -> list[HostBlock | None]:
        """The parts, as of `HostTier.wanted_soon`."""
        return [self.host.wanted_soon(key, tokens) for key in self._keys(digest)]

    def _keys(self, digest: bytes) -> Iterator[bytes]:
        return state_keys(digest, self.host.state_pages)

    def _backed_up(self, parts: Sequence[HostBlock]) -> None:
        if self.host.traffic is not None:
            self.host.traffic.store_whole([part for part in parts if not part.dropped])
        self.host.unpin(parts)


@dataclass(kw_only=True, slots=True)
class StatefulPrefix(HostPrefix):
    """With the parts of the state at its end, where no anchor on the device has it."""

    backups: StateBackups
    state: Sequence[HostBlock]

    @property
    def has_state(self) -> bool:
        return bool(self.state)

    def load(self, pages: Sequence[PageId], row: ReqPoolIdx | None = None) -> LoadedPages:
        loaded = HostPrefix.load(self, pages)
        if row is None:
            self.backups.host.unpin(self.state)
        else:
            self.backups.load(self.state, row)
        return loaded

    def release(self) -> None:
        HostPrefix.release(self)
        self.backups.host.unpin(self.state)


class StatefulTiers(TieredCache):
    """A `TieredCache` whose prefixes end at states."""

    def __init__(
        self, *, page_size: int, page_bytes: int, host: HostTier, policy: WritePolicy, anchors: StateAnchors
    ) -> None:
        super().__init__(
            page_size=page_size, page_bytes=page_bytes, host=host, policy=policy, usable=anchors.usable_blocks
        )
        anchors.losing, anchors.keeping = self._losing, self._keeping
        self._anchors = anchors
        self._backups = StateBackups(host=host)
        self._blocks: dict[PageId, Candidate] = {}
        """Of the tree, as far as it has announced them."""
        self._wanted_states: dict[PageId, None] = {}
        """Pages whose anchors are to be backed up, in the order in which that was wanted."""

    def match(
        self, token_ids: Sequence[int], *, space: CacheSpace = BASE_SPACE, max_tokens: int | None = None
    ) -> MatchResult:
        """As deep as there is a state, on the device or in host memory."""
        found = self._tree.match(token_ids, space=space, max_tokens=max_tokens)
        path = self._hashes_after(found, token_ids, max_tokens) if len(self.host.blocks) else ()
        blocks: list[HostBlock] = []
        state: list[HostBlock] = []
        depth = len(found.pages)
        for length, (digest, tokens) in enumerate(path, depth + 1):
            if length > found.known:
                block = self.host.find(digest, tokens)
                if block is None:
                    break
                blocks.append(block)
            if self._may_have_state(length) and (parts := self._backups.find(digest, tokens)):
                depth, state = length, parts
        known = found.known + len(blocks)
        blocks = blocks[: max(0, depth - found.known)]
        for block in (*blocks, *state):
            self.host.blocks.pin(block)
        if state:
            self._tree.unlock(found.lock)
            found = self._tree.match_blocks(token_ids, space=space, blocks=depth - len(blocks))
        assert isinstance(found.lock, PathLock), f"{found.lock!r} is not a lock of the tree"
        slower = StatefulPrefix(cache=self, lock=found.lock, blocks=blocks, backups=self._backups, state=state)
        return MatchResult(pages=found.pages, lock=found.lock, slower=slower, known=known)

    def evict(self, num_pages: int) -> list[PageId]:
        pages = super().evict(num_pages)
        self._backups.queue()
        return pages

    def clear(self) -> list[PageId]:
        self._wanted_states.clear()
        return super().clear()

    def poll(self) -> bool:
        """One state a turn: some of them are as large as thousands of tokens."""
        moved = super().poll()
        for page, made in self._anchors.take_changes():
            if made and self._policy is WritePolicy.WRITE_THROUGH and not self._anchors.is_provisional(page):
                self._wanted_states[page] = None
        if not self._wanted_states:
            return moved
        page = next(iter(self._wanted_states))
        del self._wanted_states[page]
        self._back_up(page)
        self._backups.queue()
        return True

    def load(self, prefix: HostPrefix, pages: Sequence[PageId]) -> LoadedPages:
        loaded = super().load(prefix, pages)
        used = prefix.lock.node.pages[-1:]
        if self._policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            self._wanted_states.update(dict.fromkeys(used))
        return loaded

    def _worth_reading(self, found: MatchResult, token_ids: Sequence[int], max_tokens: int) -> list[HostBlock]:
        """Up to the deepest state that some tier has: no further block is."""
        path: list[tuple[bytes, bytes]] = []
        depth = 0
        for digest, tokens in self._hashes_after(found, token_ids, max_tokens):
            blocks = len(found.pages) + len(path) + 1
            missing = max(0, blocks - found.known)
            if missing + self.host.state_pages > self.prefetch_limit or (missing and not self.host.has(digest)):
                break
            path.append((digest, tokens))
            if self._may_have_state(blocks) and self._backups.is_anywhere(digest):
                depth = len(path)
        if not depth:
            return []
        on_device = max(0, found.known - len(found.pages))
        wanted = [self.host.wanted_soon(digest, tokens) for digest, tokens in path[on_device:depth]]
        if None not in wanted:
            wanted += self._backups.wanted_soon(*path[depth - 1])
        return [block for block in wanted if block is not None and block.loading]

    # TreeWatcher

    def stored(self, node: Node, start: int, stop: int) -> None:
        super().stored(node, start, stop)
        self._blocks.update((block.page, block) for block in candidates_of(node, start, stop))

    def dropping(self, leaf: Node, keep: int) -> None:
        super().dropping(leaf, keep)
        for page in reversed(leaf.pages[keep:]):
            # Its block is in host memory now if the policy takes it there.
            if not self._clearing and self.host.blocks.get(self._blocks[page].digest) is not None:
                self._back_up(page)
            self._wanted_states.pop(page, None)
            del self._blocks[page]

    def _losing(self, page: PageId, slot: int) -> None:
        """Another anchor gets `slot`. The step that writes it is launched after the copy."""
        self._tree.announce()
        block = self._blocks[page]
        if self._policy is not WritePolicy.WRITE_THROUGH_SELECTIVE or self.host.blocks.get(block.digest) is not None:
            self._backups.prepare(block, slot)
            self._backups.queue()
        self._wanted_states.pop(page, None)

    def _keeping(self, page: PageId) -> None:
        """The anchor of `page` was provisional and is kept like others from now on."""
        if self._policy is WritePolicy.WRITE_THROUGH:
            self._wanted_states[page] = None

    def _back_up(self, page: PageId) -> None:
        """The anchor of `page`, if it still is there and not provisional."""
        slot = self._anchors.slot_of(page)
        if slot is not None and not self._anchors.is_provisional(page):
            self._backups.prepare(self._blocks[page], slot)

    def _may_have_state(self, blocks: int) -> bool:
        """Whether an anchor may be after so many."""
        return blocks * self._page_size % self._anchors.grain == 0
