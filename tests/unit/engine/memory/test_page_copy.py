import pytest
import torch

from tandem_engine.memory.host.pages import HostPool
from tandem_engine.memory.page_copies import CopyKind, PageCopier, PageCopy, parts_of_state, refuse_copies
from tandem_engine.memory.state_pool import StatePool, StateSpec
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


def test_pages_copied_to_the_host_come_back_into_other_pages(device, host):
    copier = PageCopier(device, host)
    report = copier(copy(CopyKind.DEVICE_TO_HOST, [3, 1], [0, 2]))
    assert content(host) == [4, 0, 2, 0]
    copier(copy(CopyKind.HOST_TO_DEVICE, [2, 0], [3, 0]))
    assert content(device) == [4, 2, 3, 2]
    assert report.pages == 2


def test_page_copy_with_unequal_numbers_of_sources_and_targets_is_refused(device):
    with pytest.raises(AssertionError, match="2 pages into 1"):
        copy(CopyKind.DEVICE_TO_HOST, [1, 2], [3])


def test_executor_without_copier_rejects_page_copies():
    with pytest.raises(AssertionError, match="has no copier"):
        refuse_copies(copy(CopyKind.DEVICE_TO_HOST, [1], [2]))


SPEC = StateSpec(layers=2, history=3, channels=20, heads=2, key_size=6, value_size=5, dtype=torch.float32)
"""A state of 1,024 bytes."""


@pytest.mark.parametrize("page_bytes", [1024, 300, 4096])
def test_state_round_trips_through_pages_of_any_size(device, page_bytes):
    states = StatePool(SPEC, rows=3, device="cpu")
    states.bytes_view().copy_(torch.arange(4 * 1024).view(4, 1024) % 251)
    before, parts = states.bytes_view().clone(), parts_of_state(1024, page_bytes)
    host = HostPool(num_pages=2 * parts, page_bytes=page_bytes)
    copier, pages = PageCopier(device, host, states), [*range(parts)][::-1]
    copier(copy(CopyKind.STATE_TO_HOST, [*range(2 * parts, 3 * parts)], pages))
    states.bytes_view().fill_(0xFF)
    report = copier(copy(CopyKind.HOST_TO_STATE, pages, [*range(parts, 2 * parts)]))
    assert report.pages == parts
    assert torch.equal(states.bytes_view()[1], before[2])
    assert bool((states.bytes_view()[[0, 2, 3]] == 0xFF).all())


def test_model_without_states_copies_none(device, host):
    with pytest.raises(AssertionError, match="state_to_host of a model without states"):
        PageCopier(device, host)(copy(CopyKind.STATE_TO_HOST, [1], [2]))
