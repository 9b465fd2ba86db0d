import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.base.names import PageId
from tandem_engine.memory.radix_cache import Node, shared_blocks
from tandem_engine.messages.kv_events import BASE_SPACE, TOKEN_BYTES, CacheSpace, chain_hashes, chain_seed, pack_tokens

TOKENS = [*range(100, 112)]


def make_root(space: CacheSpace = BASE_SPACE) -> Node:
    return Node(space=space, block_bytes=4 * TOKEN_BYTES)


def make_leaf(root: Node, tokens: list[int], *, first_page: int = 1) -> Node:
    return root.add_child(pack_tokens(tokens), [PageId(first_page + i) for i in range(len(tokens) // 4)])


@pytest.mark.parametrize("differs", range(41))
def test_common_blocks_stops_at_the_block_that_differs(differs: int) -> None:
    tokens = [*range(40)]
    leaf = make_leaf(make_root(), tokens)
    other = [token + (i == differs) for i, token in enumerate(tokens)]
    assert leaf.common_blocks(pack_tokens(other)) == differs // 4
    assert leaf.common_blocks(pack_tokens(other[:20])) == min(5, differs // 4)
    assert leaf.common_blocks(pack_tokens([*other, 7, 7, 7, 7])) == differs // 4


@given(st.binary(max_size=40), st.binary(max_size=12), st.binary(max_size=12), st.integers(1, 5))
def test_shared_blocks_counts_whole_equal_blocks(prefix: bytes, one: bytes, other: bytes, size: int) -> None:
    one, other = prefix + one, prefix + other
    expected = 0
    while (end := (expected + 1) * size) <= min(len(one), len(other)) and one[:end] == other[:end]:
        expected += 1
    assert shared_blocks(one, other, size) == expected


def test_node_split_divides_pages_and_copies_lock_count() -> None:
    root = make_root()
    lower = make_leaf(root, TOKENS)
    lower.lock_count = 2
    upper = lower.split(1)
    assert (upper.pages, lower.pages) == ([1], [2, 3])
    assert (upper.key, lower.key) == (pack_tokens(TOKENS[:4]), pack_tokens(TOKENS[4:]))
    assert (upper.lock_count, lower.lock_count) == (2, 2)
    assert [*lower.lineage()] == [lower, upper, root]
    assert root.children == {upper.first_block: upper}
    assert upper.children == {lower.first_block: lower}
    assert lower.path_pages() == (1, 2, 3)


@pytest.mark.parametrize("split_first", [True, False])
def test_block_hashes_are_equal_before_and_after_split(split_first: bool) -> None:
    root = make_root(CacheSpace("tenant"))
    lower = make_leaf(root, TOKENS)
    if not split_first:
        lower.chain()
    upper = lower.split(2)
    assert [*upper.chain(), *lower.chain()] == chain_hashes(TOKENS, 4, parent=chain_seed("tenant"))


def test_leaf_grows_at_its_end_and_hashes_only_new_tokens() -> None:
    leaf = make_leaf(make_root(), TOKENS[:4])
    before = leaf.chain()[0]
    leaf.grow(pack_tokens(TOKENS[4:]), [PageId(7), PageId(9)])
    assert leaf.pages == [1, 7, 9]
    assert leaf.chain() == chain_hashes(TOKENS, 4, parent=chain_seed(""))
    assert leaf.chain()[0] is before


def test_truncating_keeps_the_head_of_the_leaf() -> None:
    root = make_root()
    leaf = make_leaf(root, TOKENS)
    leaf.chain()
    assert leaf.truncate(1) == [2, 3]
    assert (len(leaf.key), len(leaf.pages), len(leaf.hashes)) == (4 * TOKEN_BYTES, 1, 1)
    assert leaf in root.children.values()


def test_truncating_to_nothing_removes_the_leaf() -> None:
    root = make_root()
    assert make_leaf(root, TOKENS).truncate(0) == [1, 2, 3]
    assert root.children == {}


def test_parent_cannot_be_truncated() -> None:
    parent = make_leaf(make_root(), TOKENS)
    make_leaf(parent, [1, 2, 3, 4], first_page=9)
    with pytest.raises(AssertionError, match="1 children would lose their prefix"):
        parent.truncate(0)


def test_parent_cannot_grow() -> None:
    parent = make_leaf(make_root(), TOKENS)
    make_leaf(parent, [1, 2, 3, 4], first_page=9)
    with pytest.raises(AssertionError, match="1 children would change their prefix"):
        parent.grow(pack_tokens(TOKENS[:4]), [PageId(5)])


@pytest.mark.parametrize("at", [0, 3])
def test_split_leaves_no_empty_node(at: int) -> None:  # [one-length-unit]
    leaf = make_leaf(make_root(), TOKENS)
    with pytest.raises(AssertionError, match=f"at {at}"):
        leaf.split(at)
