"""KV memory with tiers, around copies that a test runs when it likes."""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from tandem_engine.config import HostConfig, WritePolicy
from tandem_engine.memory.host.memory import HostMemory
from tandem_engine.memory.host.pages import HostPool
from tandem_engine.memory.host.storage import HostStorage
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.page_copies import CopyKind, CopyQueue, CopyReport, PageCopy
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.messages.kv_events import BASE_SPACE, CacheSpace, Tier
from tandem_testing.memory_builders import assert_conserved, make_memory, start_request
from tandem_testing.memory_events import TierReader

PAGE_SIZE = 4
PAGE_BYTES = 16


class HeldCopies:
    """Copies that are done when `run` is called, in order."""

    def __init__(self) -> None:
        self.seen: list[PageCopy] = []
        self._pending: deque[tuple[PageCopy, Future[CopyReport]]] = deque()

    def __call__(self, copy: PageCopy) -> Future[CopyReport]:
        self.seen.append(copy)
        self._pending.append((copy, Future()))
        return self._pending[-1][1]

    def run(self) -> None:
        while self._pending:
            copy, future = self._pending.popleft()
            future.set_result(CopyReport(pages=len(copy.source), seconds=1e-3 * len(copy.source)))

    def pages(self, kind: CopyKind) -> int:
        """Copied so far, or about to be."""
        return sum(len(copy.source) for copy in self.seen if copy.kind is kind)


@dataclass(kw_only=True)
class Tiers:
    """Memory, and what a test asks of it."""

    memory: KvMemory
    host: HostMemory
    device: HeldCopies
    events: TierReader

    def serve(self, tokens: list[int], *, space: CacheSpace = BASE_SPACE) -> None:
        """Compute a prompt, leave it in the cache and go."""
        kv = start_request(self.memory, tokens, space=space)
        self.memory.release(kv, tokens, checkpoint=True, after_step=None)

    def admit(self, tokens: list[int]) -> RequestKv:
        """A request that is about to compute what no tier has."""
        kv = self.memory.begin(tokens, space=BASE_SPACE, max_match=len(tokens) - 1)
        assert kv is not None
        assert self.memory.ensure(kv, len(tokens))
        self.memory.load_back(kv, tokens)
        return kv

    def matched(self, tokens: list[int], *, at_most: int, space: CacheSpace = BASE_SPACE) -> int:
        """Tokens that a request would not have to compute."""
        kv = self.memory.begin(tokens, space=space, max_match=at_most)
        assert kv is not None
        matched = kv.matched_len
        self.memory.release(kv, (), checkpoint=False, after_step=None)
        return matched

    def turn(self) -> None:
        """The loop goes round, and the device keeps up."""
        self.memory.poll()
        self.device.run()
        self.memory.poll()

    def evict_device(self) -> None:
        """Another user needs every page for a moment."""
        pages = self.memory.reserve_pages(self.memory.available_pages())
        assert pages is not None
        self.memory.give_back(pages)

    def known(self, tier: Tier) -> set[bytes]:
        """Blocks of a tier, as the events tell."""
        return self.events.read(self.memory.cache.take_events()).tiers[tier]

    def check(self, *kvs: RequestKv) -> None:
        assert_conserved(self.memory, kvs)


def make_tiers(
    policy: WritePolicy = WritePolicy.WRITE_BACK,
    *,
    device_pages: int = 8,
    host_pages: int = 16,
    swap_pages: int = 0,
    storage: HostStorage | None = None,
) -> Tiers:
    device = HeldCopies()
    copies = CopyQueue(submit=device)
    config = HostConfig(enable_cache=True, write_policy=policy, swap_bytes=swap_pages * PAGE_BYTES)
    pool = HostPool(num_pages=host_pages, page_bytes=PAGE_BYTES)
    host = HostMemory.build(pool, copies, config, page_size=PAGE_SIZE, storage=storage)
    memory = make_memory(page_size=PAGE_SIZE, usable_pages=device_pages, copies=copies, host=host)
    return Tiers(memory=memory, host=host, device=device, events=TierReader())
