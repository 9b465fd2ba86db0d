"""KV memory of any size, and a check that nothing of it was lost or doubled."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from tandem_engine.base.names import PageId
from tandem_engine.memory.allocator import PageAllocator, ReqToTokenPool
from tandem_engine.memory.anchored_cache import AnchoredCache
from tandem_engine.memory.audit import ConservationReport, check_conservation
from tandem_engine.memory.host.memory import HostMemory
from tandem_engine.memory.host.tier import SwappedKv
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.page_copies import CopyQueue, CopyReport, PageCopy
from tandem_engine.memory.prefix_cache import PrefixCache
from tandem_engine.memory.radix_cache import RadixCache
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.memory.state_anchors import StateAnchors
from tandem_engine.memory.window_pages import WindowPages, usable_blocks
from tandem_engine.messages.kv_events import BASE_SPACE, CacheSpace


def copy_at_once(copy: PageCopy) -> Future[CopyReport]:
    """A device that has done each copy when it is asked for."""
    future: Future[CopyReport] = Future()
    future.set_result(CopyReport(pages=len(copy.source), seconds=1e-6 * len(copy.source)))
    return future


def make_memory(
    *,
    page_size: int = 4,
    usable_pages: int = 16,
    max_rows: int = 4,
    max_pages: int = 16,
    cache: PrefixCache | None = None,
    copies: CopyQueue | None = None,
    host: HostMemory | None = None,
    windows: Sequence[WindowPages] = (),
    anchors: StateAnchors | None = None,
    stateful: bool = False,
) -> KvMemory:
    """Memory with `usable_pages` besides the dummy page.

    Its cache is the one given, else that of `host`, else one of `anchors` or a radix cache. `host` needs the `copies`
    it was built on.
    """
    copies = copies or CopyQueue(submit=copy_at_once)
    tiered = None if host is None else host.cache
    if cache is None and tiered is None and anchors is not None:
        cache = AnchoredCache(page_size, anchors)
    return KvMemory(
        rows=ReqToTokenPool(max_rows, max_pages),
        allocator=PageAllocator(usable_pages + 1, copies, windows if anchors is None else [*windows, anchors]),
        cache=cache or tiered or RadixCache(page_size, usable=partial(usable_blocks, windows) if windows else None),
        page_size=page_size,
        copies=copies,
        host=host,
        windows=windows,
        stateful=stateful,
        anchors=anchors,
    )


def start_request(memory: KvMemory, token_ids: list[int], *, space: CacheSpace = BASE_SPACE) -> RequestKv:
    """A request whose whole prompt is computed and settled."""
    kv = memory.begin(token_ids, space=space, max_match=len(token_ids) - 1)
    assert kv is not None, "no row is free"
    assert memory.ensure(kv, len(token_ids)), "no pages are free"
    memory.commit(kv, len(token_ids))
    return kv


def assert_conserved(
    memory: KvMemory,
    kvs: Iterable[RequestKv] = (),
    held: Iterable[PageId] = (),
    swapped: Iterable[SwappedKv] = (),
) -> ConservationReport:
    report = check_conservation(memory, kvs, held, swapped)
    assert report.problems == ()
    return report
