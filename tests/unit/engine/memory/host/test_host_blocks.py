import pytest

from tandem_engine.base.names import HostPageId
from tandem_engine.memory.host.pages import HostBlock, HostBlocks


@pytest.fixture
def blocks():
    return HostBlocks()


def add(blocks: HostBlocks, *names: str) -> list[HostBlock]:
    """Filled blocks, the first the least recent."""
    added = []
    for name in names:
        block = HostBlock(digest=name.encode(), tokens=b"", page=HostPageId(len(blocks)))
        blocks.add(block)
        blocks.unpin(block)
        added.append(block)
    return added


def evicted(blocks: HostBlocks) -> list[str]:
    order = []
    while (block := blocks.evict()) is not None:
        order.append(block.digest.decode())
    return order


def test_eviction_is_least_recent_first_until_empty(blocks):  # [evict-exact]
    add(blocks, "a", "b", "c")
    assert blocks.evictable == 3
    assert evicted(blocks) == ["a", "b", "c"]
    assert len(blocks) == blocks.evictable == 0


def test_touched_or_unpinned_block_is_recent(blocks):
    a, b, _ = add(blocks, "a", "b", "c")
    blocks.touch(a)
    blocks.pin(b)
    blocks.unpin(b)
    assert evicted(blocks) == ["c", "a", "b"]


def test_pinned_block_is_never_evicted(blocks):  # [pinned-host-block] [copy-acked]
    a, _ = add(blocks, "a", "b")
    blocks.pin(a)
    assert evicted(blocks) == ["b"]
    assert blocks.get(b"a") is a
    blocks.touch(a)
    blocks.unpin(a)
    assert evicted(blocks) == ["a"]


def test_block_of_which_the_device_has_a_copy_can_be_evicted(blocks):  # [mirror-reclaimable]
    (a,) = add(blocks, "a")
    a.on_device = True
    assert evicted(blocks) == ["a"]


def test_dropped_block_is_not_found_and_frees_page_at_last_unpin(blocks):
    (a,) = add(blocks, "a")
    blocks.pin(a)
    blocks.pin(a)
    assert blocks.drop(a) is None
    assert blocks.get(b"a") is None
    assert [*blocks.pages()] == [a.page]
    assert blocks.unpin(a) is None
    assert blocks.unpin(a) == a.page
    assert [*blocks.pages()] == []


def test_dropped_block_without_pins_frees_its_page(blocks):
    (a,) = add(blocks, "a")
    assert blocks.drop(a) == a.page
    assert blocks.evictable == 0


def test_pin_is_given_back_once(blocks):  # [lock-released-once]
    (a,) = add(blocks, "a")
    with pytest.raises(AssertionError, match="unpinned twice"):
        blocks.unpin(a)


def test_audit_counts_again(blocks):
    (a,) = add(blocks, "a")
    assert blocks.audit() == []
    a.pins = 1
    assert blocks.audit() == ["0 unpinned host blocks, 1 in the recency list"]
