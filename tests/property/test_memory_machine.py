"""Any order of operations on KV memory keeps every page with one owner and every prefix true.

The model is what the device would hold: for each page, the tokens written to it. A matched page must
hold exactly the tokens of the key and of the same tenant. Steps in flight write their overshoot token
when they land, long after the request that they were launched for may be gone [page-fence].
"""

from dataclasses import dataclass
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem_engine.base.names import DUMMY_PAGE, PageId, ReqPoolIdx
from tandem_engine.memory.cache_groups import Reach
from tandem_engine.memory.prefix_cache import NoPrefixCache, PrefixCache
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.memory.window_pages import WindowPages
from tandem_engine.messages.kv_events import BASE_SPACE, DIGEST_BYTES, CacheSpace, chain_hashes
from tandem_testing.long_tests import examples
from tandem_testing.memory_builders import assert_conserved, make_memory
from tandem_testing.memory_events import replayed

USABLE_PAGES = 12
ROWS = 4
ROW_PAGES = 8
SPACES = (BASE_SPACE, CacheSpace("tenant"), CacheSpace(adapter=bytes([7] * DIGEST_BYTES)))


@dataclass(kw_only=True, eq=False)
class Live:
    """A request and the tokens it stands for."""

    kv: RequestKv
    tokens: list[int]
    step: int | None = None
    """The step in flight that has it."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """KV of one token: it depends on the token, its position and the tenant."""

    space: CacheSpace
    position: int
    token: int


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """What a launched step does for one request, whatever becomes of the request by then."""

    request: Live
    row: ReqPoolIdx
    reads: tuple[PageId, ...]
    """The page table was copied at launch; what is read for a request that left is dropped."""
    writes: PageId
    offset: int


live_requests = st.runner().flatmap(lambda machine: st.sampled_from(machine.live))
any_live = precondition(lambda machine: machine.live)
batches = st.runner().flatmap(lambda machine: st.lists(st.sampled_from(machine.live), min_size=1, unique=True))


class MemoryMachine(RuleBasedStateMachine):
    page_size: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        self.memory = make_memory(
            page_size=self.page_size,
            usable_pages=USABLE_PAGES,
            max_rows=ROWS,
            max_pages=ROW_PAGES,
            cache=self.make_cache(),
            windows=self.make_windows(),
        )
        self.live: list[Live] = []
        self.held: list[PageId] = []
        self.device: dict[tuple[PageId, int], Content] = {}
        self.windows: list[dict[tuple[int, int], Content]] = [{} for _ in self.memory.windows]
        """What layers with a window hold, in their pages."""
        self.in_flight: dict[int, list[InFlight]] = {}
        self.launched = 0
        self.announced: set[bytes] = set()

    def make_cache(self) -> PrefixCache | None:
        """None for a radix cache."""
        return None

    def make_windows(self) -> list[WindowPages]:
        return []

    @rule(
        blocks=st.lists(st.integers(0, 1), max_size=3),
        tail=st.integers(1, 15),
        space=st.sampled_from(SPACES),
    )
    def begin(self, blocks: list[int], tail: int, space: CacheSpace) -> None:
        """Prompts over two block contents, so that they share prefixes and diverge often."""
        tokens = [block * 100 + i for block in blocks for i in range(self.page_size)]
        self.admit([*tokens, *[7] * min(tail, self.page_size)], space)

    @any_live
    @rule(request=live_requests, shared=st.integers(0, 3), tail=st.integers(1, 15))
    def fork(self, request: Live, shared: int, tail: int) -> None:
        """A prompt that begins like a live request: a duplicate that computes the same pages, or a branch."""
        tokens = request.tokens[: shared * self.page_size]
        self.admit([*tokens, *[7] * min(tail, self.page_size)], request.kv.space)

    @any_live
    @rule(request=live_requests, pages=st.integers(1, ROW_PAGES), less=st.integers(0, 15))
    def ensure(self, request: Live, pages: int, less: int) -> None:
        total = pages * self.page_size - less % self.page_size
        before, available = tuple(request.kv.pages), self.memory.available_pages()
        missing = max(0, pages - len(before))
        fits = missing <= self.memory.reservable_pages()
        granted = self.memory.ensure(request.kv, total)
        after = tuple(request.kv.pages)
        assert granted == fits
        assert after[: len(before)] == before
        assert len(after) - len(before) == (missing if granted else 0)
        assert self.memory.available_pages() == available - (len(after) - len(before))

    @any_live
    @rule(request=live_requests, advance=st.integers(1, ROW_PAGES * 16))
    def commit(self, request: Live, advance: int) -> None:
        """Compute and settle some tokens of the request; past its prompt it generates."""
        self.compute(request, min(request.kv.committed_len + advance, request.kv.allocated_len))

    @any_live
    @rule(batch=batches)
    def prefill(self, batch: list[Live]) -> None:
        """Compute whole prompts; those that are alike compute the same pages twice."""
        for request in batch:
            if self.memory.ensure(request.kv, len(request.tokens)):
                self.compute(request, max(request.kv.committed_len, len(request.tokens)))

    @any_live
    @rule(batch=batches)
    def checkpoint(self, batch: list[Live]) -> None:
        for request in batch:
            self.memory.checkpoint(request.kv, request.tokens, after_step=request.step)

    @any_live
    @rule(batch=batches)
    def pass_by(self, batch: list[Live]) -> None:
        """Windows move with what is committed."""
        for request in batch:
            self.memory.pass_by(request.kv)

    @any_live
    @rule(batch=batches)
    def launch(self, batch: list[Live]) -> None:
        """A step starts to compute the token after the settled ones."""
        self.launched += 1
        self.in_flight[self.launched] = []
        for request in batch:
            kv = request.kv
            if request.step is None and kv.committed_len < kv.allocated_len:
                request.step = self.launched
                page, offset = divmod(kv.committed_len, self.page_size)
                self.in_flight[self.launched].append(
                    InFlight(
                        request=request,
                        row=kv.row,
                        reads=tuple(kv.pages)[:page],
                        writes=kv.pages[page],
                        offset=offset,
                    )
                )

    @precondition(lambda self: self.in_flight)
    @rule()
    def settle(self) -> None:
        """The oldest step lands. No other request may have got a row or page of its requests until then
        [page-fence]."""
        step = min(self.in_flight)
        others = [request for request in self.live if request.step != step]
        writable = {*self.held, *(page for request in others for page in request.kv.private_pages)}
        for work in self.in_flight.pop(step):
            assert all(work.row != request.kv.row for request in others)
            assert work.writes not in writable | {*self.memory.cache.pages()}
            assert work.request not in self.live or not writable & {*work.reads}
            self.device.pop((work.writes, work.offset), None)
        self.memory.settled(step)
        for request in self.live:
            if request.step == step:
                request.step = None

    @any_live
    @rule(request=live_requests, checkpoint=st.booleans())
    def release(self, request: Live, checkpoint: bool) -> None:
        self.live.remove(request)
        self.memory.release(request.kv, request.tokens, checkpoint=checkpoint, after_step=request.step)

    @any_live
    @rule(request=live_requests)
    def detach(self, request: Live) -> None:
        if request.step is not None:
            return
        self.live.remove(request)
        self.hold(self.memory.detach(request.kv))

    @rule(n=st.integers(1, 4))
    def reserve(self, n: int) -> None:
        available = self.memory.reservable_pages()
        pages = self.memory.reserve_pages(n)
        assert (pages is None) == (n > available)
        self.hold(pages or [])

    @precondition(lambda self: self.held)
    @rule(n=st.integers(1, 4))
    def give_back(self, n: int) -> None:
        returned, self.held = self.held[:n], self.held[n:]
        self.memory.give_back(returned)

    @rule()
    def clear_cache(self) -> None:
        evictable = self.memory.cache.evictable_pages()
        assert self.memory.clear_cache() == evictable
        assert self.memory.cache.evictable_pages() == 0

    @invariant()
    def every_page_has_one_owner(self) -> None:
        assert_conserved(self.memory, [request.kv for request in self.live], self.held)

    @invariant()
    def settled_tokens_are_where_the_table_says(self) -> None:
        """A prefix that `begin` matched counts as settled, so this proves matches as well."""
        for request in self.live:
            kv = request.kv
            table = self.memory.rows.table[kv.row].tolist()
            for position in range(kv.committed_len):
                page, offset = divmod(position, self.page_size)
                expected = Content(space=kv.space, position=position, token=request.tokens[position])
                assert self.device.get((table[page], offset)) == expected

    @invariant()
    def windows_hold_what_the_next_token_reads(self) -> None:
        for request in self.live:
            committed = request.kv.committed_len
            for window, content in zip(self.memory.windows, self.windows, strict=True):
                for position in range(window.reach.first_read(committed), committed):
                    page, offset = divmod(position, self.page_size)
                    expected = Content(space=request.kv.space, position=position, token=request.tokens[position])
                    assert content[int(window.page_of[request.kv.pages[page]]), offset] == expected

    @invariant()
    def events_add_up_to_the_snapshot(self) -> None:
        self.announced = replayed(self.memory.cache.take_events(), self.announced)
        assert self.announced == replayed(self.memory.cache.snapshot_events())

    @invariant()
    def every_pinned_block_is_announced(self) -> None:
        for request in self.live:
            pinned = request.tokens[: request.kv.cache_protected_len]
            chain = chain_hashes(pinned, self.page_size, parent=request.kv.space.seed)
            assert {*chain} <= self.announced

    def teardown(self) -> None:
        """When everything has left, everything is available again."""
        for request in self.live:
            self.memory.release(request.kv, request.tokens, checkpoint=True, after_step=request.step)
        self.memory.settled(self.launched)
        self.memory.give_back(self.held)
        self.memory.clear_cache()
        assert self.memory.allocator.available == USABLE_PAGES
        assert self.memory.rows.available == ROWS
        assert all(window.free_pages == window.num_pages - 1 for window in self.memory.windows)

    def admit(self, tokens: list[int], space: CacheSpace) -> None:
        cap, rows = len(tokens) - 1, self.memory.rows.available
        planned = self.memory.cached_len(tokens, space=space, max_match=cap)
        kv = self.memory.begin(tokens, space=space, max_match=cap)
        assert (kv is None) == (rows == 0)
        if kv is not None:
            assert kv.committed_len == kv.cache_protected_len == planned <= cap
            self.live.append(Live(kv=kv, tokens=tokens))

    def compute(self, request: Live, end: int) -> None:
        """Write the content of each token and commit; nothing of a request settles while a step has it."""
        if request.step is not None:
            return
        kv = request.kv
        request.tokens += [9] * (end - len(request.tokens))
        for position in range(kv.committed_len, end):
            page, offset = divmod(position, self.page_size)
            content = Content(space=kv.space, position=position, token=request.tokens[position])
            self.device[kv.pages[page], offset] = content
            for window, held in zip(self.memory.windows, self.windows, strict=True):
                here = int(window.page_of[kv.pages[page]])
                assert here != DUMMY_PAGE, f"token {position} is computed and its window has no page for it"
                held[here, offset] = content
        self.memory.commit(kv, end)

    def hold(self, pages: list[PageId]) -> None:
        """A peer writes to these pages at any time until they are given back."""
        self.held += pages
        for page in pages:
            for offset in range(self.page_size):
                self.device.pop((page, offset), None)


class WithWindows(MemoryMachine):
    """One so short that its pages are scarce, and one that few requests leave."""

    page_size = 4

    def make_windows(self) -> list[WindowPages]:
        return [
            WindowPages(Reach(tokens), page_size=4, num_pages=pages + 1, page_ids=USABLE_PAGES + 1)
            for tokens, pages in ((5, 7), (14, 9))
        ]


class PageSize1(MemoryMachine):
    page_size = 1


class PageSize4(MemoryMachine):
    page_size = 4


class PageSize16(MemoryMachine):
    page_size = 16


class WithoutCache(MemoryMachine):
    page_size = 4

    def make_cache(self) -> PrefixCache | None:
        return NoPrefixCache()


SETTINGS = settings(max_examples=examples(50), stateful_step_count=50, deadline=None, derandomize=True)

TestPageSize1 = PageSize1.TestCase
TestPageSize1.settings = SETTINGS
TestPageSize4 = PageSize4.TestCase
TestPageSize4.settings = SETTINGS
TestPageSize16 = PageSize16.TestCase
TestPageSize16.settings = SETTINGS
TestWithWindows = WithWindows.TestCase
TestWithWindows.settings = SETTINGS
TestWithoutCache = WithoutCache.TestCase
TestWithoutCache.settings = SETTINGS
