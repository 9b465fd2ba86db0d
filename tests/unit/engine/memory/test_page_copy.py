import pytest

from tandem_engine.memory.host.pages import HostPool
from tandem_engine.memory.page_copies import CopyKind, PageCopier, PageCopy, refuse_copies
from tandem_testing.fake_executor import make_fake_pool

PAGES = 4


@pytest.fixture
def device():
    pool = make_fake_pool(num_pages=PAGES, page_size=2)
    for page in range(PAGES):
        pool.page_view(page).fill_(page + 1)
    return pool


@pytest.fixture
def host(device):
    return HostPool(num_pages=PAGES, page_bytes=device.page_bytes)


def content(pool) -> list[int]:
    """The byte that fills each page."""
    return [int(page[0]) for page in pool.bytes_view() if bool((page == page[0]).all())]


def copy(kind: CopyKind, source: list[int], target: list[int]) -> PageCopy:
    return PageCopy(kind=kind, source=source, target=target)


def test_pages_go_to_the_host_and_back_to_other_places(device, host):
    copier = PageCopier(device, host)
    report = copier(copy(CopyKind.DEVICE_TO_HOST, [3, 1], [0, 2]))
    assert content(host) == [4, 0, 2, 0]
    copier(copy(CopyKind.HOST_TO_DEVICE, [2, 0], [3, 0]))
    assert content(device) == [4, 2, 3, 2]
    assert report.pages == 2


def test_sources_and_targets_are_as_many(device):
    with pytest.raises(AssertionError, match="2 pages into 1"):
        copy(CopyKind.DEVICE_TO_HOST, [1, 2], [3])


def test_an_executor_without_a_copier_says_so():
    with pytest.raises(AssertionError, match="has no copier"):
        refuse_copies(copy(CopyKind.DEVICE_TO_HOST, [1], [2]))
