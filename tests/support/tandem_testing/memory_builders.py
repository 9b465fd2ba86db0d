"""KV memory of any size, and a check that nothing of it was lost or doubled."""

from collections.abc import Iterable

from tandem_engine.memory.allocator import PageAllocator
from tandem_engine.memory.conservation import ConservationReport, check_conservation
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.prefix_cache import PrefixCache
from tandem_engine.memory.radix_cache import RadixCache
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.memory.rows import ReqToTokenPool
from tandem_engine.names import PageId


def make_memory(
    *,
    page_size: int = 4,
    usable_pages: int = 16,
    max_rows: int = 4,
    max_pages: int = 16,
    cache: PrefixCache | None = None,
) -> KvMemory:
    """Memory with `usable_pages` besides the dummy page, and a radix cache unless another is given."""
    return KvMemory(
        rows=ReqToTokenPool(max_rows, max_pages),
        allocator=PageAllocator(usable_pages + 1),
        cache=RadixCache(page_size) if cache is None else cache,
        page_size=page_size,
    )


def start_request(memory: KvMemory, token_ids: list[int], *, salt: str = "") -> RequestKv:
    """A request whose whole prompt is computed and settled."""
    kv = memory.begin(token_ids, salt=salt, max_match=len(token_ids) - 1)
    assert kv is not None, "no row is free"
    assert memory.ensure(kv, len(token_ids)), "no pages are free"
    memory.commit(kv, len(token_ids))
    return kv


def assert_conserved(
    memory: KvMemory, kvs: Iterable[RequestKv] = (), held: Iterable[PageId] = ()
) -> ConservationReport:
    report = check_conservation(memory, kvs, held)
    assert report.problems == ()
    return report
