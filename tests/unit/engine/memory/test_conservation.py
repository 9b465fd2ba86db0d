"""Each test breaks one invariant on purpose and expects the audit to name it."""

import pytest

from tandem_engine.base.names import DUMMY_PAGE, PADDING_ROW, PageId
from tandem_engine.memory.audit import ConservationReport, check_conservation
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.messages.kv_events import BASE_SPACE
from tandem_testing.memory_builders import assert_conserved, make_memory, start_request

PROMPT = [*range(10)]


@pytest.fixture
def memory() -> KvMemory:
    return make_memory(page_size=4, usable_pages=16)


@pytest.fixture
def kv(memory: KvMemory) -> RequestKv:
    """Two pages in the tree, one private."""
    kv = start_request(memory, PROMPT)
    memory.checkpoint(kv, PROMPT)
    return kv


def audit(memory: KvMemory, *kvs: RequestKv, held: tuple[PageId, ...] = ()) -> ConservationReport:
    return check_conservation(memory, kvs, held)


def test_every_page_is_counted_in_one_set(memory: KvMemory, kv: RequestKv) -> None:
    held = tuple(memory.allocator.alloc(3))
    memory.allocator.free_after(1, memory.allocator.alloc(1))
    report = assert_conserved(memory, [kv], held)
    assert (report.free, report.fenced, report.tree, report.private, report.held) == (10, 1, 2, 1, 3)
    assert report.requests == 1


def test_leaked_page_is_named(memory: KvMemory, kv: RequestKv) -> None:
    (page,) = memory.allocator.alloc(1)
    assert audit(memory, kv).problems == (f"page {page} leaked: no set has it",)


def test_audit_names_only_the_first_of_many_leaked_pages(memory: KvMemory) -> None:
    memory.allocator.alloc(8)
    assert audit(memory).problems == ("page 1, 2, 3, 4, 5 and 3 more leaked: no set has it",)


def test_page_with_two_owners_is_named_with_both(memory: KvMemory, kv: RequestKv) -> None:  # [page-conservation]
    page = kv.private_pages[0]
    assert audit(memory, kv, held=(page,)).problems == (f"page {page} has 2 owners: a request and a transfer hold",)


def test_page_in_two_tree_nodes_is_found(memory: KvMemory, kv: RequestKv) -> None:  # [page-conservation]
    page = kv.pages[0]
    memory.cache.unlock(memory.cache.insert([90, 91, 92, 93], [page]).lock)
    assert f"page {page} has 2 owners: the tree and the tree" in audit(memory, kv).problems


def test_sums_that_match_do_not_hide_a_swap(memory: KvMemory, kv: RequestKv) -> None:  # [page-conservation]
    (leaked,) = memory.allocator.alloc(1)
    doubled = kv.private_pages[0]
    problems = audit(memory, kv, held=(doubled,)).problems
    assert f"page {leaked} leaked: no set has it" in problems
    assert f"page {doubled} has 2 owners: a request and a transfer hold" in problems


def test_audit_reports_held_dummy_page(memory: KvMemory) -> None:  # [dummy-page]
    assert audit(memory, held=(DUMMY_PAGE,)).problems == ("page 0 has 2 owners: a transfer hold and the dummy",)


def test_page_outside_the_pool_is_named(memory: KvMemory) -> None:
    assert audit(memory, held=(PageId(17),)).problems == ("page 17 outside the pool of 17",)


def test_leaked_row_is_named(memory: KvMemory) -> None:  # [admission-unwinds]
    row = memory.rows.alloc()
    assert audit(memory).problems == (f"row {row} leaked: no request or hold has it",)


def test_freed_row_still_in_use_is_named(memory: KvMemory, kv: RequestKv) -> None:
    memory.rows.free(kv.row)
    assert audit(memory, kv).problems == (
        f"row {kv.row} free but still used by a request or hold",
        f"row {kv.row}: the table does not list exactly the pages that the request holds",
    )


def test_row_of_two_requests_is_named(memory: KvMemory) -> None:
    kv = memory.begin(PROMPT, space=BASE_SPACE, max_match=0)
    assert kv is not None
    duplicate = RequestKv(row=kv.row, space=BASE_SPACE, page_size=4)
    assert audit(memory, kv, duplicate).problems == (f"row {kv.row} used by more than one request or hold",)


def test_written_padding_row_is_reported(memory: KvMemory) -> None:
    memory.rows.table[PADDING_ROW, 0] = 3
    assert audit(memory).problems == ("the padding row was written to",)


def test_row_that_names_other_pages_is_reported(memory: KvMemory, kv: RequestKv) -> None:
    memory.rows.table[kv.row, 1] = 9
    assert audit(memory, kv).problems == (
        f"row {kv.row}: the table does not list exactly the pages that the request holds",
    )


def test_pinned_page_that_left_the_tree_is_named(memory: KvMemory) -> None:  # [lock-covers-node]
    kv = start_request(memory, PROMPT)
    kv.cache_protected_len = 8
    pinned = f"page {kv.pages[0]}, {kv.pages[1]}"
    assert f"row {kv.row}: {pinned} pinned in the tree but not in it" in audit(memory, kv).problems


def test_cursors_out_of_order_are_reported(memory: KvMemory) -> None:
    kv = start_request(memory, PROMPT)
    kv.committed_len = 13
    assert audit(memory, kv).problems == (
        f"row {kv.row}: cursors out of order, protected 0, committed 13, allocated 12",
    )


def test_lock_without_a_request_is_reported(memory: KvMemory) -> None:  # [lock-released-once]
    pages = memory.allocator.alloc(1)
    memory.cache.insert(PROMPT[:4], pages)
    assert audit(memory).problems == (
        "tree node with pages [] counts 1 locks, requests hold 0",
        f"tree node with pages {pages} counts 1 locks, requests hold 0",
    )
