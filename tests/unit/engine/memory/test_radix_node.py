import pytest

from tandem_engine.memory.radix_node import Node, whole_blocks
from tandem_engine.messages.block_hash import chain_hashes, chain_seed
from tandem_engine.names import PageId

TOKENS = [*range(100, 112)]


def make_leaf(root: Node, tokens: list[int], *, first_page: int = 1) -> Node:
    blocks = whole_blocks(tokens, 4)
    return root.add_child(blocks, [PageId(first_page + i) for i in range(len(blocks))])


@pytest.mark.parametrize(
    ("length", "page_size", "blocks"), [(0, 4, 0), (3, 4, 0), (4, 4, 1), (11, 4, 2), (5, 1, 5), (31, 16, 1)]
)
def test_a_trailing_partial_block_is_left_out(length: int, page_size: int, blocks: int) -> None:  # T27
    cut = whole_blocks(range(length), page_size)
    assert len(cut) == blocks
    assert [token for block in cut for token in block] == [*range(blocks * page_size)]


def test_common_blocks_stops_at_the_first_difference() -> None:
    leaf = make_leaf(Node(salt=""), TOKENS)
    other = whole_blocks([*TOKENS[:8], 0, 0, 0, 0], 4)
    assert leaf.common_blocks(other, 0) == 2
    assert leaf.common_blocks(other[:1], 0) == 1
    assert leaf.common_blocks(other, 1) == 0


def test_a_split_keeps_pages_with_their_blocks_and_locks_with_the_path() -> None:
    root = Node(salt="")
    lower = make_leaf(root, TOKENS)
    lower.lock_count = 2
    upper = lower.split(1)
    assert (upper.pages, lower.pages) == ([1], [2, 3])
    assert (upper.blocks, lower.blocks) == (whole_blocks(TOKENS[:4], 4), whole_blocks(TOKENS[4:], 4))
    assert (upper.lock_count, lower.lock_count) == (2, 2)
    assert [*lower.lineage()] == [lower, upper, root]
    assert root.children == {upper.blocks[0]: upper}
    assert upper.children == {lower.blocks[0]: lower}
    assert lower.path_pages() == (1, 2, 3)


@pytest.mark.parametrize("split_first", [True, False])
def test_hashes_are_the_shared_chain_whether_asked_before_or_after_a_split(split_first: bool) -> None:
    root = Node(salt="tenant")
    lower = make_leaf(root, TOKENS)
    if not split_first:
        lower.chain()
    upper = lower.split(2)
    assert [*upper.chain(), *lower.chain()] == chain_hashes(TOKENS, 4, parent=chain_seed("tenant"))


def test_truncating_keeps_the_head_of_the_leaf() -> None:
    root = Node(salt="")
    leaf = make_leaf(root, TOKENS)
    leaf.chain()
    assert leaf.truncate(1) == [2, 3]
    assert (len(leaf.blocks), len(leaf.pages), len(leaf.hashes)) == (1, 1, 1)
    assert leaf in root.children.values()


def test_truncating_to_nothing_removes_the_leaf() -> None:
    root = Node(salt="")
    assert make_leaf(root, TOKENS).truncate(0) == [1, 2, 3]
    assert root.children == {}


def test_a_parent_cannot_be_truncated() -> None:
    parent = make_leaf(Node(salt=""), TOKENS)
    make_leaf(parent, [1, 2, 3, 4], first_page=9)
    with pytest.raises(AssertionError, match="1 children would lose their prefix"):
        parent.truncate(0)


@pytest.mark.parametrize("at", [0, 3])
def test_a_split_leaves_no_empty_node(at: int) -> None:  # T29
    leaf = make_leaf(Node(salt=""), TOKENS)
    with pytest.raises(AssertionError, match=f"at {at}"):
        leaf.split(at)
