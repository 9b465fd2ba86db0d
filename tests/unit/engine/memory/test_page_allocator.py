from concurrent.futures import Future

import pytest

from tandem_engine.base.errors import OutOfPagesError
from tandem_engine.base.names import DUMMY_PAGE, PageId
from tandem_engine.memory.allocator import PageAllocator, Writer
from tandem_engine.memory.page_copies import CopyKind, CopyQueue, CopyReport, PageCopy


@pytest.fixture
def allocator() -> PageAllocator:
    return PageAllocator(num_pages=6)


def test_dummy_page_is_never_given_out(allocator: PageAllocator) -> None:  # [dummy-page]
    assert sorted(allocator.alloc(5)) == [1, 2, 3, 4, 5]


def test_too_few_pages_raise_and_take_nothing(allocator: PageAllocator) -> None:
    allocator.alloc(2)
    with pytest.raises(OutOfPagesError, match="4 KV pages are required and 3 of 5 are free"):
        allocator.alloc(4)
    assert allocator.available == 3


def test_allocation_of_zero_pages_is_empty(allocator: PageAllocator) -> None:
    assert allocator.alloc(0) == []
    assert allocator.available == 5


def test_light_load_stays_on_few_pages(allocator: PageAllocator) -> None:
    used = set()
    for _ in range(4):
        pages = allocator.alloc(2)
        used |= {*pages}
        allocator.free(pages)
    assert used == {1, 2}


def test_page_freed_twice_is_named(allocator: PageAllocator) -> None:
    (page,) = allocator.alloc(1)
    allocator.free([page])
    with pytest.raises(AssertionError, match=f"page {page} given back while free"):
        allocator.free([page])


def test_page_twice_in_one_call_is_named(allocator: PageAllocator) -> None:
    (page,) = allocator.alloc(1)
    with pytest.raises(AssertionError, match=f"page {page} given back while free"):
        allocator.free([page, page])


def test_fenced_page_freed_again_is_named(allocator: PageAllocator) -> None:
    (page,) = allocator.alloc(1)
    allocator.free_after(1, [page])
    with pytest.raises(AssertionError, match=f"page {page} given back while fenced"):
        allocator.free([page])


@pytest.mark.parametrize("page", [DUMMY_PAGE, PageId(-1)])
def test_neither_dummy_nor_sentinel_can_be_freed(allocator: PageAllocator, page: PageId) -> None:  # [dummy-page]
    allocator.alloc(5)
    with pytest.raises(AssertionError, match=f"page {page} "):
        allocator.free([page])


def test_late_write_cannot_reach_a_page_of_another_request(allocator: PageAllocator) -> None:  # [page-fence]
    written_by_step_3 = allocator.alloc(2)
    allocator.free_after(3, written_by_step_3)
    others = allocator.alloc(3)
    assert not {*others} & {*written_by_step_3}
    with pytest.raises(OutOfPagesError, match="2 more are waiting"):
        allocator.alloc(1)
    allocator.settled(3)
    assert {*allocator.alloc(2)} == {*written_by_step_3}


def test_fenced_pages_are_unavailable_but_free_in_the_audit(allocator: PageAllocator) -> None:
    allocator.free_after(3, allocator.alloc(2))
    assert (allocator.available, allocator.fenced_pages) == (3, 2)
    assert sorted(allocator.free_page_ids()) == [1, 2, 3, 4, 5]


def test_pages_freed_after_completed_step_are_not_fenced(allocator: PageAllocator) -> None:
    allocator.settled(3)
    allocator.free_after(3, allocator.alloc(2))
    assert (allocator.available, allocator.fenced_pages) == (5, 0)


def test_page_read_by_a_copy_is_not_allocated_to_a_peer() -> None:  # [copy-acked] [page-fence]
    done: Future[CopyReport] = Future()
    copies = CopyQueue(submit=lambda _copy: done)
    allocator = PageAllocator(3, copies)
    pages = allocator.alloc(2)
    copies.launch(PageCopy(kind=CopyKind.DEVICE_TO_HOST, source=pages, target=[0, 1]))
    allocator.free(pages)
    assert allocator.available == allocator.available_to(Writer.STREAM) == 2
    assert allocator.available_to(Writer.PEER) == 0
    with pytest.raises(OutOfPagesError):
        allocator.alloc(1, Writer.PEER)
    assert allocator.alloc(1) == pages[:1]
    done.set_result(CopyReport(pages=2, seconds=0.0))
    copies.poll()
    assert allocator.alloc(1, Writer.PEER) == pages[1:]


def test_page_used_by_step_and_copy_waits_for_both() -> None:  # [page-fence]
    copies = CopyQueue(submit=lambda _copy: Future())
    allocator = PageAllocator(2, copies)
    pages = allocator.alloc(1)
    allocator.free_after(1, pages)
    copies.launch(PageCopy(kind=CopyKind.HOST_TO_DEVICE, source=[0], target=pages))
    assert allocator.available == 0
    allocator.settled(1)
    assert allocator.available_to(Writer.STREAM) == 1
    assert allocator.available_to(Writer.PEER) == 0
    assert sorted(allocator.free_page_ids()) == pages
