"""Rows, pages and prefix cache as one: all that the scheduler and the transfer stages need of KV memory.

    1. begin        a row, and the longest cached prefix, locked; its continuation in host memory, pinned
       load_back    the request is admitted: the part in host memory is copied to its first private pages
    2. ensure       private pages for the tokens of the next step; the cache evicts to provide them
    3. commit       the step completed: KV up to here may be sent, cached or reused
    4. checkpoint   whole committed pages enter the cache while the request runs (any number of times)
    5. release      row, lock and private pages are released, after an optional last checkpoint
       detach       the same, but private pages go to a transfer hold, and from there to `give_back`

    tokens:  0 ........ cache_protected_len ........ committed_len ........ allocated_len
    pages:   tree, locked by the request | private, content valid | private, content pending

`release` and `detach` are the only ways out, and a second one is a bug [single-release]. `after_step` is the newest
launched step with the request in it (None: no such step is in flight): what it may still write to waits in the fence
[page-fence]. The lock is released at once, because such a step only reads the tree's pages and its result for this
request is dropped.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tandem_engine.base.names import PageId
from tandem_engine.memory.allocator import PageAllocator, ReqToTokenPool, Writer
from tandem_engine.memory.host.memory import HostMemory
from tandem_engine.memory.page_copies import CopyQueue
from tandem_engine.memory.prefix_cache import Lock, PrefixCache
from tandem_engine.memory.request_anchors import (
    NO_MOVES,
    StateMoves,
    aim,
    attach_anchors,
    drop_anchors,
    moves_of_step,
)
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.memory.state_anchors import StateAnchors
from tandem_engine.memory.window_pages import WindowPages
from tandem_engine.messages.kv_events import CacheSpace


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """Cached pages that are kept although no request uses them now."""

    lock: Lock
    pages: int
    used: tuple[tuple[PageId, ...], ...] = ()
    """Pages that the next turn reads, for each group of layers with a window."""
    anchor: PageId | None = None
    """Whose state a peer reads."""


class Touched(NamedTuple):
    """What may still read or write a slot of a state that was given out."""

    step: int
    copy: int


@dataclass(kw_only=True, slots=True)
class KvMemory:
    """Moves pages between free list, tree, requests and holds. Scheduler thread only."""

    rows: ReqToTokenPool
    allocator: PageAllocator
    cache: PrefixCache
    page_size: int
    copies: CopyQueue
    host: HostMemory | None = None
    """None without a hierarchical cache and swap space: then the device is all there is."""
    windows: Sequence[WindowPages] = ()
    """Of groups of layers with a window; () where all layers keep all tokens."""
    stateful: bool = False
    """Some layers keep a state for each row: a sequence does not continue from pages alone."""
    anchors: StateAnchors | None = None
    """Where cached prefixes can be continued then; None without such layers or without a cache."""
    pins: list[Pin] = field(default_factory=list)
    last_settled: int = -1
    """Step."""
    last_launched: int = -1
    """Step that copies states. Without anchors none does."""
    landings: set[int] = field(default_factory=set)
    """Slots of states that peers write."""

    def poll(self) -> bool:
        """Once per iteration, before planning: process completed copies, queue backups. True if anything moved."""
        moved = self.copies.poll()
        return (self.host is not None and self.host.poll()) or moved

    def available_pages(self) -> int:
        """Pages that `ensure` could get now: free or evictable. Fenced pages do not count."""
        return self.allocator.available + self.cache.evictable_pages()

    def load(self) -> tuple[int, int]:
        """Free pages, and evictable ones, of the group of layers that has the least left for its size."""
        free, evictable = self.allocator.available, self.cache.evictable_pages()
        for window in self.windows:
            ids_per_page = (self.allocator.num_pages - 1) / (window.num_pages - 1)
            free = min(free, int(window.free_pages * ids_per_page))
            evictable = min(evictable, int(window.available * ids_per_page) - free)
        return free, evictable

    def reservable_pages(self) -> int:
        """Pages that `reserve_pages` could provide now: as `available_pages`, in every group of layers."""
        return min([self.available_pages(), *(window.available for window in self.windows)])

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def least_match(self, tokens: int) -> int:
        """`tokens` rounded up to a length by which a match in the cache can grow."""
        unit = self.page_size if self.anchors is None else self.anchors.grain
        return -(-tokens // unit) * unit

    def cached_len(self, token_ids: Sequence[int], *, space: CacheSpace, max_match: int) -> int:
        """Tokens that `begin` would find. Changes nothing."""
        return self.cache.peek(token_ids, space=space, max_tokens=max_match) * self.page_size

    def begin(self, token_ids: Sequence[int], *, space: CacheSpace, max_match: int) -> RequestKv | None:
        """Take a row and lock the longest cached prefix of at most `max_match` tokens.

        The caller passes the length less one, so that at least one token is computed [one-token-computed]. None when
        every row is taken; nothing is held then, nor after an exception [admission-unwinds]. The match is held in every
        group before anything can be evicted: its path is locked, its windows are in use and its anchor is pinned
        [match-held-in-groups].
        """
        with ExitStack() as undo:
            row = self.rows.alloc()
            if row is None:
                return None
            undo.callback(self.rows.free, row)
            match = self.cache.match(token_ids, space=space, max_tokens=max_match)
            undo.callback(self.cache.unlock, match.lock)
            if match.slower is not None:
                undo.callback(match.slower.release)
            self.rows.write(row, 0, match.pages)
            undo.pop_all()
        matched = len(match.pages) * self.page_size
        passed = [window.passed_blocks(matched) for window in self.windows]
        for window, first in zip(self.windows, passed, strict=True):
            window.use(match.pages[first:])
        kv = RequestKv(
            row=row,
            space=space,
            page_size=self.page_size,
            pages=list(match.pages),
            cache_protected_len=matched,
            committed_len=matched,
            computed_from=matched,
            known_len=match.known * self.page_size,
            lock=match.lock,
            slower=match.slower,
            copy=self.copies.newest_load,
            passed=passed,
        )
        if self.anchors is not None:
            aim(kv, self.anchors, tokens=len(token_ids), known=match.known * self.page_size)
        return kv

    def load_back(self, kv: RequestKv, token_ids: Sequence[int], *, with_state: bool = True) -> None:
        """`kv` of `token_ids` is admitted and has its pages: copy there what host memory has of its prefix.

        Those pages enter the tree at once. They are filled before any forward that is launched later reads
        them; others wait (`readable`). Without `with_state` it gets its state otherwise (`expect_state`).
        """
        slower, kv.slower = kv.slower, None
        if slower is None:
            return
        first = len(kv.pages) - len(kv.private_pages)
        row = kv.row if with_state and slower.has_state else None
        kv.loaded = slower.load(kv.pages[first : first + slower.num_pages], row)
        if slower.num_pages or row is not None:
            kv.copy = self.copies.launched
        if slower.num_pages:
            self.commit(kv, kv.committed_len + slower.num_pages * self.page_size)
            self.mark_brought(kv, kv.committed_len)
            self.checkpoint(kv, token_ids)
        if row is not None:
            # Its first step copies the state to an anchor: the next request finds it on the device.
            later = [length for length in kv.anchor_lens if length > kv.committed_len]
            kv.anchor_lens = [kv.committed_len, *later]

    def readable(self, kv: RequestKv) -> bool:
        """Whether its committed tokens are in their pages for a reader outside the executor's order, too
        [settled-only-sent]."""
        return self.copies.passed(kv.copy)

    @property
    def open_to_peers(self) -> bool:
        """Whether no copy still touches the state of a row that a peer might be given [page-fence]."""
        return self.copies.passed(self.copies.newest_of_row)

    def ensure(self, kv: RequestKv, total_tokens: int, writer: Writer = Writer.STREAM) -> bool:
        """Make `kv` hold pages for `total_tokens`, evicting as needed. False, and no page taken, if it cannot.

        With `Writer.PEER` it cannot, either, while copies still touch the pages that are free, or states: ask again.
        """
        self._assert_live(kv)
        missing = self.pages_for(total_tokens) - len(kv.pages)
        if missing <= 0:
            return True
        if writer is Writer.PEER and not self.open_to_peers:
            return False
        pages = self.reserve_pages(missing, writer)
        if pages is None:
            return False
        self.rows.write(kv.row, len(kv.pages), pages)
        kv.pages += pages
        return True

    def reserve_pages(self, n: int, writer: Writer = Writer.STREAM) -> list[PageId] | None:
        """Pages for a holder that is no request, until `give_back`: of all groups, or None [groups-all-or-none]."""
        shortfall = n - self.allocator.available
        if shortfall > self.cache.evictable_pages() or not self.windows_have(n):
            return None
        if shortfall > 0:
            self._evict(shortfall)
        if n > self.allocator.available_to(writer):
            return None
        for window in self.windows:
            window.make_room(n, self._evict)
        pages = self.allocator.alloc(n, writer)
        for window in self.windows:
            window.attach(pages)
        return pages

    def windows_have(self, n: int) -> bool:
        """Whether every group of layers with a window can have `n` more pages."""
        return all(n <= window.available for window in self.windows)

    def pass_by(self, kv: RequestKv) -> None:
        """Drop what no token after the committed ones reads [windows-pass-committed]. Only layers with a window do."""
        cached = kv.cache_protected_len // self.page_size
        for index, window in enumerate(self.windows):
            first, last = kv.passed[index], window.passed_blocks(kv.committed_len)
            if first < last:
                window.pass_by(kv.pages[first : min(last, cached)])
                window.drop(kv.pages[max(first, cached) : last])
                kv.passed[index] = last

    def commit(self, kv: RequestKv, committed_len: int) -> None:
        """KV of tokens [0, committed_len) is final."""
        self._assert_live(kv)
        assert kv.committed_len <= committed_len <= kv.allocated_len, (
            f"row {kv.row}: cannot commit {committed_len} tokens with {kv.committed_len} committed "
            f"and {kv.allocated_len} allocated"
        )
        kv.committed_len = committed_len

    def commit_next(self, kv: RequestKv) -> None:
        """`commit` of one more token. Called for every token that is decoded."""
        kv.committed_len += 1
        assert kv.committed_len <= len(kv.pages) * self.page_size, (
            f"row {kv.row}: cannot commit {kv.committed_len} tokens with {kv.allocated_len} allocated"
        )

    def mark_brought(self, kv: RequestKv, tokens: int) -> None:
        """No step computes KV of the first `tokens` for this request: it is found, copied or received."""
        self._assert_live(kv)
        kv.computed_from = tokens

    def checkpoint(self, kv: RequestKv, token_ids: Sequence[int], *, after_step: int | None = None) -> None:
        """Give the cache the whole settled pages of `token_ids[:committed_len]`; the request runs on.

        Where the cache already had a page for the same tokens, the request changes over to that one and
        its own goes back through the fence: a step in flight may still read it.
        """
        self._assert_live(kv)
        first, whole = kv.cache_protected_len // self.page_size, kv.committed_len // self.page_size
        settled = whole * self.page_size
        assert settled <= len(token_ids), f"row {kv.row}: {settled} settled tokens, {len(token_ids)} ids given"
        if first < whole:
            self._share(kv, token_ids[kv.cache_protected_len : settled], kv.pages[first:whole], after_step)
        if self.anchors is not None:
            attach_anchors(kv, self.anchors, settled=self.last_settled)

    def state_moves(
        self, step: int, kvs: Sequence[RequestKv], starts: Sequence[int], stops: Sequence[int]
    ) -> StateMoves:
        """What `step`, which computes tokens [start, stop) of each of `kvs`, copies. Called once, when it is launched.

        Anchors that requests begin with are read before any slot is given to another one.
        """
        if self.anchors is None:
            return NO_MOVES
        self.last_launched = step
        return moves_of_step(self.anchors, step, kvs, starts, stops)

    def expect_state(self, kv: RequestKv) -> None:
        """A peer or a copy writes the state after all tokens that `kv` begins with. So it continues from no anchor, and
        no step here has the states at which anchors were to be made."""
        if self.anchors is not None:
            drop_anchors(kv, self.anchors)
            kv.anchor_lens.clear()
            kv.trial_lens.clear()

    def reserve_state(self) -> tuple[int, Touched] | None:
        """A slot for the state of a prefix that a peer writes once it is `untouched`. None if none is free.

        It comes back through `attach_state` or `give_back_state`.
        """
        slot = None if self.anchors is None else self.anchors.take()
        if slot is None:
            return None
        self.landings.add(slot)
        return slot, Touched(step=self.last_launched, copy=self.copies.newest_of_state)

    def untouched(self, touched: Touched) -> bool:
        """Whether all that could read or write the slot when it was given out is over [page-fence]."""
        return self.last_settled >= touched.step and self.copies.passed(touched.copy)

    def attach_state(self, page: PageId, slot: int) -> None:
        """The state in `slot` is that at the end of `page`, which the cache has."""
        assert self.anchors is not None, "a state of a prefix where none can be continued"
        self.landings.discard(slot)
        self.anchors.attach(page, slot)

    def give_back_state(self, slot: int) -> None:
        """Nothing came of it, and its writer will not touch it any more."""
        assert self.anchors is not None, "a state of a prefix where none can be continued"
        self.landings.remove(slot)
        self.anchors.give_back(slot)

    def kept_blocks(self, kv: RequestKv) -> int:
        """Leading blocks that `kv` is expected to find again after a while: others have locked them, too. Anchors on
        trial do not count: they make room first."""
        assert kv.lock is not None, f"row {kv.row} holds no lock"
        shared = self.cache.shared_pages(kv.lock)
        return shared if self.anchors is None else self.anchors.usable_blocks(kv.pages[:shared], trials=False)

    def is_news(self, kv: RequestKv, token_ids: Sequence[int]) -> bool:
        """Whether a checkpoint would exchange no page: the cache has nothing of `token_ids` but what `kv` has
        pinned."""
        assert kv.lock is not None, f"row {kv.row} holds no lock"
        return self.cache.peek_after(kv.lock, token_ids[kv.cache_protected_len : kv.committed_len]) == 0

    def release(self, kv: RequestKv, token_ids: Sequence[int], *, checkpoint: bool, after_step: int | None) -> None:
        """Give back all that `kv` holds; with `checkpoint` the cache first adopts its whole settled pages."""
        if checkpoint:
            self.checkpoint(kv, token_ids, after_step=after_step)
        self._free(self._release_kv(kv, after_step), after_step)

    def begin_again(self, kv: RequestKv, token_ids: Sequence[int], *, max_match: int) -> RequestKv:
        """Give back what `kv` of `token_ids` holds, and `begin`: its state is that of steps which count for nothing.

        No step is in flight, so its row is free.
        """
        space = kv.space
        settled = kv.committed_len
        self.distrust(kv)
        self.release(kv, token_ids[:settled], checkpoint=True, after_step=None)
        # The device has those pages, so at most a state comes from host memory: nothing that needs a page.
        begun = self.begin(token_ids, space=space, max_match=min(max_match, settled))
        assert begun is not None, "a row that was given back is gone"
        self.load_back(begun, token_ids)
        return begun

    def distrust(self, kv: RequestKv) -> None:
        """Steps with `kv` raised, maybe before they copied its state: no pending copy becomes an anchor
        [state-steps-once].
        """
        if self.anchors is not None:
            drop_anchors(kv, self.anchors)

    def renew(self, kv: RequestKv) -> RequestKv:
        """All that `kv` holds, under a new identity: what was computed beyond the settled tokens is to be forgotten.

        State that belongs to a holding is keyed by its identity, and has to be rebuilt [history-rebuilt].
        """
        self._assert_live(kv)
        renewed = replace(kv)
        kv.released, kv.lock = True, None
        return renewed

    def detach(self, kv: RequestKv, *, keep_row: bool = False) -> list[PageId]:
        """Give back row and lock, and hand the private pages to a hold that outlives the request.

        No step in flight may have this request in it. The pages come back through `give_back`. With `keep_row` a peer
        may still write the state of its row, which is the hold's as well, and comes back through `rows.free`.
        """
        return self._release_kv(kv, None, keep_row=keep_row)

    def give_back(self, pages: Sequence[PageId]) -> None:
        """Pages from `detach` or `reserve_pages` that will not be written to any more."""
        self.allocator.free(pages)

    def pin(self, token_ids: Sequence[int], *, space: CacheSpace) -> Pin:
        """Keep what the device has of `token_ids` until `unpin`."""
        match = self.cache.match(token_ids, space=space)
        if match.slower is not None:
            match.slower.release()
        used = [match.pages[window.passed_blocks(len(match.pages) * self.page_size) :] for window in self.windows]
        for window, pages in zip(self.windows, used, strict=True):
            window.use(pages)
        pin = Pin(lock=match.lock, pages=len(match.pages), used=tuple(used))
        self.pins.append(pin)
        return pin

    def unpin(self, pin: Pin, *, spent: bool = False) -> None:
        """Let eviction have the pages again. `spent` as of `PrefixCache.unlock`."""
        self.pins.remove(pin)
        if pin.anchor is not None:
            assert self.anchors is not None, "an anchor is pinned where there are none"
            self.anchors.unpin(pin.anchor, used=True)
        for window, pages in zip(self.windows, pin.used, strict=False):
            window.leave(pages)
        self.cache.unlock(pin.lock, spent=spent)

    def settled(self, step: int) -> None:
        """`step` and all before it have settled: opens the fence for what waited for them."""
        self.last_settled = max(self.last_settled, step)
        self.allocator.settled(step)
        self.rows.settled(step)

    def clear_cache(self) -> int:
        """Empty the cache, but for what requests have locked. Returns the number of pages freed."""
        pages = self.cache.clear()
        self.allocator.free(pages)
        return len(pages)

    def _release_kv(self, kv: RequestKv, after_step: int | None, *, keep_row: bool = False) -> list[PageId]:
        """Row and lock back; the private pages, and with `keep_row` the row, are the caller's now.

        Windows and anchors that the request uses are given back here too, on every path [every-group-released].
        """
        self._assert_live(kv)
        kv.released = True
        if kv.slower is not None:
            slower, kv.slower = kv.slower, None
            slower.release()
        cached = kv.cache_protected_len // self.page_size
        for window, first in zip(self.windows, kv.passed, strict=True):
            window.leave(kv.pages[first:cached])
        if self.anchors is not None:
            drop_anchors(kv, self.anchors)
        private, kv.pages = kv.private_pages, []
        kv.cache_protected_len = kv.committed_len = 0
        self._unlock(kv)
        if keep_row:
            return private
        if after_step is None:
            self.rows.free(kv.row)
        else:
            self.rows.free_after(after_step, kv.row)
        return private

    def _evict(self, n: int) -> int:
        """Free up to `n` pages of the cache. Returns their number."""
        pages = self.cache.evict(n)
        self.allocator.free(pages)
        return len(pages)

    def _share(self, kv: RequestKv, token_ids: Sequence[int], pages: Sequence[PageId], after_step: int | None) -> None:
        """Give the cache `pages` of `token_ids`, which follow what it has of `kv`."""
        assert kv.lock is not None, f"row {kv.row} holds no lock"
        first = kv.cache_protected_len // self.page_size
        inserted = self.cache.extend(kv.lock, token_ids, pages)
        kv.lock = inserted.lock
        self._share_windows(kv, first, inserted.pages)
        kv.cache_protected_len += len(inserted.pages) * self.page_size
        if inserted.duplicates:
            kv.pages[first : first + len(pages)] = inserted.pages
            self.rows.write(kv.row, first, inserted.pages)
            self._free(inserted.duplicates, after_step)

    def _share_windows(self, kv: RequestKv, first: int, pages: Sequence[PageId]) -> None:
        """The cache has `pages` for the blocks of `kv` from `first` on: its own, or others of the same tokens."""
        for window, passed in zip(self.windows, kv.passed, strict=True):
            for block, page in enumerate(pages, first):
                if page != kv.pages[block]:
                    window.fill(page, kv.pages[block])
            window.use(pages[max(0, passed - first) :])

    def _unlock(self, kv: RequestKv) -> None:
        assert kv.lock is not None, f"row {kv.row} holds no lock"
        lock, kv.lock = kv.lock, None
        self.cache.unlock(lock)

    def _free(self, pages: Sequence[PageId], after_step: int | None) -> None:
        if after_step is None:
            self.allocator.free(pages)
        else:
            self.allocator.free_after(after_step, pages)

    def _assert_live(self, kv: RequestKv) -> None:
        assert not kv.released, f"KV of row {kv.row} was released already"
