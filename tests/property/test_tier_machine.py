"""Any order of operations on tiered KV memory keeps every page with one owner and every byte where it belongs.

The model is what the memories would hold. Forwards and page copies wait in one line, the stream, and run in order,
as late as the machine likes; peers write to device pages and storage to host pages whenever they like. A forward
asserts that it reads the history of its request. A write outside the stream asserts that nothing in the stream
still touches its page [pinned-host-block] [copy-acked] [late-write] [page-fence].
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem_engine.base.names import PageId
from tandem_engine.config import HostConfig, WritePolicy
from tandem_engine.memory.allocator import Writer
from tandem_engine.memory.host.memory import HostMemory
from tandem_engine.memory.host.pages import HostPool
from tandem_engine.memory.host.storage import Fetched, PutReport
from tandem_engine.memory.host.tier import SwappedKv
from tandem_engine.memory.page_copies import CopyKind, CopyQueue, CopyReport, PageCopy
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.messages.kv_events import BASE_SPACE, DIGEST_BYTES, CacheSpace, Tier, block_hash
from tandem_testing.long_tests import examples
from tandem_testing.memory_builders import assert_conserved, make_memory
from tandem_testing.memory_events import TierReader

PAGE_SIZE = 2
PAGE_BYTES = 64
USABLE_PAGES = 10
HOST_PAGES = 7
SWAP_PAGES = 3
ROWS = 4
ROW_PAGES = 8
SPACES = (BASE_SPACE, CacheSpace("tenant"), CacheSpace(adapter=bytes([7] * DIGEST_BYTES)))

Content = tuple[str, tuple[int, ...]]
"""Salt, and all tokens up to the end of what was written to a page."""


def page_content(space: CacheSpace, tokens: list[int], page: int, end: int) -> Content:
    return space, tuple(tokens[: min(end, (page + 1) * PAGE_SIZE)])


@dataclass(kw_only=True)
class Operation:
    """Something in the stream, and the pages that others must not write until then."""

    run: Callable[[], None]
    device: set[int]
    host: set[int]
    fills: set[int]
    """Host pages that others must not read, either."""


class Machine:
    """The memories, and the stream that works on them."""

    def __init__(self) -> None:
        self.device: dict[int, Content | None] = {}
        self.host: dict[int, Content | None] = {}
        self.stream: deque[Operation] = deque()

    def copy(self, copy: PageCopy) -> Future[CopyReport]:
        future: Future[CopyReport] = Future()
        ends = {
            CopyKind.DEVICE_TO_HOST: (self.device, self.host),
            CopyKind.HOST_TO_DEVICE: (self.host, self.device),
        }
        source, target = ends[copy.kind]

        def run() -> None:
            for origin, destination in zip(copy.source, copy.target, strict=True):
                target[destination] = source.get(origin)
            future.set_result(CopyReport(pages=len(copy.source), seconds=1.0))

        touched = {id(self.device): set(), id(self.host): set()}
        touched[id(source)] |= {*copy.source}
        touched[id(target)] |= {*copy.target}
        fills = {*copy.target} if copy.kind is CopyKind.DEVICE_TO_HOST else set()
        self.stream.append(
            Operation(run=run, device=touched[id(self.device)], host=touched[id(self.host)], fills=fills)
        )
        return future

    def run(self, count: int) -> None:
        for _ in range(min(count, len(self.stream))):
            self.stream.popleft().run()


class Files:
    """`HostStorage` whose reads and writes happen when the machine says so. `pages` is what lies in host memory."""

    def __init__(self, machine: Machine, address: Callable[[memoryview], int]) -> None:
        self.machine = machine
        self.address = address
        self.blocks: dict[bytes, Content] = {}
        self.damaged: set[bytes] = set()
        self.pending: deque[Callable[[], None]] = deque()

    def __contains__(self, key: bytes) -> bool:
        return key in self.blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def hashes(self):
        return iter([*self.blocks])

    def put(self, key: bytes, page: memoryview) -> Future[PutReport]:
        future: Future[PutReport] = Future()
        at = self.address(page)

        def write() -> None:
            assert not any(at in operation.fills for operation in self.machine.stream), f"host page {at} is not filled"
            content = self.machine.host.get(at)
            assert content is not None
            assert digest_of(content) == key, "what is stored is not what it is named after"
            new = key not in self.blocks
            self.blocks[key] = content
            future.set_result(PutReport(stored=new))

        self.pending.append(write)
        return future

    def get(self, key: bytes, page: memoryview) -> Future[Fetched]:
        future: Future[Fetched] = Future()
        at = self.address(page)

        def read() -> None:
            assert not any(at in operation.host for operation in self.machine.stream), f"host page {at} is being copied"
            content = self.blocks.get(key)
            if key in self.damaged:
                self.blocks.pop(key, None)
            self.machine.host[at] = None if key in self.damaged else content
            future.set_result(Fetched.ABSENT if content is None else self._outcome(key))

        self.pending.append(read)
        return future

    def _outcome(self, key: bytes) -> Fetched:
        return Fetched.LOST if key in self.damaged else Fetched.WHOLE

    def clear(self) -> None:
        """In the order of the operations, as on a thread."""
        self.run(len(self.pending))
        self.blocks.clear()

    def close(self) -> None:
        self.run(len(self.pending))

    def run(self, count: int) -> None:
        for _ in range(min(count, len(self.pending))):
            self.pending.popleft()()


def digest_of(content: Content) -> bytes:
    space, tokens = content
    digest = space.seed
    for start in range(0, len(tokens), PAGE_SIZE):
        digest = block_hash(digest, tokens[start : start + PAGE_SIZE])
    return digest


@dataclass(kw_only=True, eq=False)
class Live:
    """A request that runs."""

    kv: RequestKv
    tokens: list[int]
    step: int | None = None


@dataclass(kw_only=True, eq=False)
class Away:
    """A request that is swapped."""

    swapped: SwappedKv
    space: CacheSpace
    tokens: list[int]


live_requests = st.runner().flatmap(lambda machine: st.sampled_from(machine.live))
away_requests = st.runner().flatmap(lambda machine: st.sampled_from(machine.away))
any_live = precondition(lambda machine: machine.live)
any_away = precondition(lambda machine: machine.away)


class TierMachine(RuleBasedStateMachine):
    policy: ClassVar[WritePolicy]

    def __init__(self) -> None:
        super().__init__()
        pool = HostPool(num_pages=HOST_PAGES, page_bytes=PAGE_BYTES)
        self.machine = Machine()
        origin = pool.data.data_ptr()
        self.files = Files(self.machine, lambda page: (memory_address(page) - origin) // PAGE_BYTES)
        copies = CopyQueue(submit=self.machine.copy)
        config = HostConfig(enable_cache=True, write_policy=self.policy, swap_bytes=SWAP_PAGES * PAGE_BYTES)
        self.host = HostMemory.build(pool, copies, config, page_size=PAGE_SIZE, storage=self.files)
        self.memory = make_memory(
            page_size=PAGE_SIZE,
            usable_pages=USABLE_PAGES,
            max_rows=ROWS,
            max_pages=ROW_PAGES,
            copies=copies,
            host=self.host,
        )
        self.live: list[Live] = []
        self.away: list[Away] = []
        self.held: list[PageId] = []
        self.launched = 0
        self.settled = 0
        self.events = TierReader()

    # Requests

    @rule(blocks=st.lists(st.integers(0, 1), max_size=5), space=st.sampled_from(SPACES), admit=st.booleans())
    def begin(self, blocks: list[int], space: CacheSpace, admit: bool) -> None:
        """Prompts over two block contents, so that they share prefixes and diverge often."""
        tokens = [*(block * 100 + i for block in blocks for i in range(PAGE_SIZE)), 7]
        kv = self.memory.begin(tokens, space=space, max_match=len(tokens) - 1)
        if kv is None:
            return
        if not admit or not self.memory.ensure(kv, len(tokens)):
            self.memory.release(kv, (), checkpoint=False, after_step=None)
            return
        promised = kv.matched_len
        self.memory.load_back(kv, tokens)
        assert kv.committed_len == kv.cache_protected_len == promised <= len(tokens) - 1
        self.live.append(Live(kv=kv, tokens=tokens))

    @rule(blocks=st.lists(st.integers(0, 1), min_size=1, max_size=5), space=st.sampled_from(SPACES))
    def serve(self, blocks: list[int], space: CacheSpace) -> None:
        """A whole request, from its beginning to its end: what fills the cache."""
        before = len(self.live)
        self.begin(blocks, space, admit=True)
        for request in self.live[before:]:
            self.compute(request, more=ROW_PAGES * PAGE_SIZE)
            self.release(request, checkpoint=True)

    @rule(blocks=st.lists(st.integers(0, 1), min_size=1, max_size=4), space=st.sampled_from(SPACES))
    def serve_and_swap(self, blocks: list[int], space: CacheSpace) -> None:
        """A request that is retracted once it is computed."""
        before = len(self.live)
        self.begin(blocks, space, admit=True)
        for request in self.live[before:]:
            self.compute(request, more=ROW_PAGES * PAGE_SIZE)
            self.swap_out(request)

    @any_live
    @rule(request=live_requests, more=st.integers(1, 6))
    def compute(self, request: Live, more: int) -> None:
        """A step of the request, from launch to settlement."""
        kv = request.kv
        end = min(kv.committed_len + more, kv.allocated_len)
        if request.step is None and end > kv.committed_len:
            self.launch_tokens(request, end)
            self.machine.run(len(self.machine.stream))
            self.memory.commit(kv, end)

    @any_live
    @rule(request=live_requests, pages=st.integers(1, ROW_PAGES))
    def ensure(self, request: Live, pages: int) -> None:
        available = self.memory.available_pages()
        missing = max(0, pages - len(request.kv.pages))
        assert self.memory.ensure(request.kv, pages * PAGE_SIZE) == (missing <= available)

    @any_live
    @rule(request=live_requests)
    def launch(self, request: Live) -> None:
        """A step that is in flight for a while; the request may end before it."""
        kv = request.kv
        if request.step is None and kv.committed_len < kv.allocated_len:
            self.launched += 1
            request.step = self.launched
            self.launch_tokens(request, kv.committed_len + 1)

    @rule()
    def settle(self) -> None:
        """Everything launched lands."""
        self.machine.run(len(self.machine.stream))
        self.memory.settled(self.launched)
        for request in self.live:
            request.step = None

    @any_live
    @rule(request=live_requests)
    def checkpoint(self, request: Live) -> None:
        self.memory.checkpoint(request.kv, request.tokens, after_step=request.step)

    @any_live
    @rule(request=live_requests, checkpoint=st.booleans())
    def release(self, request: Live, checkpoint: bool) -> None:
        self.live.remove(request)
        self.memory.release(request.kv, request.tokens, checkpoint=checkpoint, after_step=request.step)

    # Swapping

    @any_live
    @rule(request=live_requests)
    def swap_out(self, request: Live) -> None:
        kv = request.kv
        if request.step is not None or kv.committed_len == 0:
            return
        swapped = self.host.swap.out(kv, shared=self.memory.cache.shared_pages(kv.lock))
        if swapped is None:
            return
        self.live.remove(request)
        self.memory.release(kv, request.tokens, checkpoint=True, after_step=None)
        self.away.append(Away(swapped=swapped, space=kv.space, tokens=request.tokens))

    @any_away
    @rule(request=away_requests)
    def swap_in(self, request: Away) -> None:
        swapped = request.swapped
        kv = self.memory.begin(request.tokens, space=request.space, max_match=swapped.committed_len)
        if kv is None:
            return
        if not self.host.swap.completes(swapped, kv) or not self.memory.ensure(kv, swapped.committed_len + 1):
            self.memory.release(kv, (), checkpoint=False, after_step=None)
            return
        self.memory.load_back(kv, request.tokens)
        self.host.swap.back(swapped, kv)
        self.away.remove(request)
        self.live.append(Live(kv=kv, tokens=request.tokens))

    @any_away
    @rule(request=away_requests)
    def abort_swapped(self, request: Away) -> None:
        self.away.remove(request)
        self.host.swap.drop(request.swapped)

    # Others

    @rule(count=st.integers(1, 3))
    def run_stream(self, count: int) -> None:
        self.machine.run(count)

    @rule(turns=st.integers(1, 3), files=st.integers(0, 4))
    def turn(self, turns: int, files: int) -> None:
        """The loop goes round: what was copied is acked, what is wanted is queued; files are written and read."""
        for _ in range(turns):
            self.memory.poll()
            self.machine.run(1)
            self.files.run(files)

    @rule(count=st.integers(1, 3))
    def run_files(self, count: int) -> None:
        self.files.run(count)

    @precondition(lambda self: self.files.blocks)
    @rule(data=st.data())
    def prefetch(self, data: st.DataObject) -> None:
        """A request arrives whose prompt begins like something that is stored."""
        space, tokens = self.files.blocks[data.draw(st.sampled_from(sorted(self.files.blocks)))]
        self.host.cache.prefetch(tokens, space=space, max_tokens=len(tokens), until=0.0)

    @precondition(lambda self: self.files.blocks)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        self.files.damaged.add(data.draw(st.sampled_from(sorted(self.files.blocks))))

    @rule(count=st.integers(1, 4))
    def grant(self, count: int) -> None:
        """A peer writes at once to what it is given."""
        pages = self.memory.reserve_pages(count, Writer.PEER) or []
        for page in pages:
            assert not any(page in operation.device for operation in self.machine.stream), f"page {page} is in use"
            self.machine.device[page] = None
        self.held += pages

    @precondition(lambda self: self.held)
    @rule()
    def give_back(self) -> None:
        self.memory.give_back(self.held)
        self.held = []

    @rule()
    def clear(self) -> None:
        self.memory.clear_cache()
        assert self.memory.cache.evictable_pages() == 0
        assert len(self.host.tier.blocks) == 0
        assert len(self.files) == 0

    # What must hold

    @invariant()
    def every_page_has_one_owner(self) -> None:
        swapped = [request.swapped for request in self.away]
        assert_conserved(self.memory, [request.kv for request in self.live], self.held, swapped)

    @invariant()
    def events_add_up(self) -> None:
        self.events.read(self.memory.cache.take_events())
        snapshot = TierReader().read(self.memory.cache.snapshot_events())
        for tier in (Tier.DEVICE, Tier.HOST):
            assert self.events.tiers[tier] == snapshot.tiers[tier]
        assert self.events.anywhere == snapshot.anywhere == snapshot.tiers[Tier.DEVICE] | snapshot.tiers[Tier.HOST]

    def teardown(self) -> None:
        """When everything has left and everything has run, everything is free."""
        for request in self.live:
            self.memory.release(request.kv, request.tokens, checkpoint=True, after_step=request.step)
        for request in self.away:
            self.host.swap.drop(request.swapped)
        self.memory.give_back(self.held)
        self.memory.clear_cache()
        for _ in range(3):
            self.machine.run(len(self.machine.stream))
            self.files.run(len(self.files.pending))
            self.memory.settled(self.launched)
            self.memory.poll()
        self.memory.clear_cache()
        assert self.memory.allocator.available_to(Writer.PEER) == USABLE_PAGES
        assert self.host.tier.pages.available == HOST_PAGES
        self.host.close()

    def launch_tokens(self, request: Live, end: int) -> None:
        """Put a forward in the stream that reads what is committed and writes up to `end`."""
        kv = request.kv
        request.tokens += [9] * (end - len(request.tokens))
        pages, space, tokens, start = [*kv.pages], kv.space, [*request.tokens], kv.committed_len

        def forward() -> None:
            if request in self.live:
                for page in range(-(-start // PAGE_SIZE)):
                    expected = page_content(space, tokens, page, start)
                    found = self.machine.device.get(pages[page])
                    assert found is not None
                    assert found[0] == space
                    assert found[1][: len(expected[1])] == expected[1], f"page {pages[page]} is not the request's"
            for page in range(start // PAGE_SIZE, -(-end // PAGE_SIZE)):
                self.machine.device[pages[page]] = page_content(space, tokens, page, end)

        # What it reads for a request that left is dropped, so a peer may have those pages.
        written = {*pages[start // PAGE_SIZE : -(-end // PAGE_SIZE)]}
        self.machine.stream.append(Operation(run=forward, device=written, host=set(), fills=set()))


def memory_address(view: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


class WriteThrough(TierMachine):
    policy = WritePolicy.WRITE_THROUGH


class Selective(TierMachine):
    policy = WritePolicy.WRITE_THROUGH_SELECTIVE


class WriteBack(TierMachine):
    policy = WritePolicy.WRITE_BACK


SETTINGS = settings(max_examples=examples(30), stateful_step_count=60, deadline=None, derandomize=True)

TestWriteThrough = WriteThrough.TestCase
TestWriteThrough.settings = SETTINGS
TestSelective = Selective.TestCase
TestSelective.settings = SETTINGS
TestWriteBack = WriteBack.TestCase
TestWriteBack.settings = SETTINGS
