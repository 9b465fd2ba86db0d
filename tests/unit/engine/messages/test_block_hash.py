"""One chain of block hashes for engine, router and gateway."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.messages.kv_events import DIGEST_BYTES, block_hash, chain_hashes, chain_seed

tokens = st.lists(st.integers(min_value=0, max_value=2**32 - 1), max_size=40)


@given(ids=tokens, extra=tokens, size=st.integers(min_value=1, max_value=8))
def test_a_prefix_has_the_prefix_of_the_hashes(ids, extra, size) -> None:
    seed = chain_seed("")
    short = chain_hashes(ids, size, parent=seed)
    assert chain_hashes([*ids, *extra], size, parent=seed)[: len(short)] == short
    assert len(short) == len(ids) // size


def test_the_chain_can_be_continued_from_any_block() -> None:
    ids = list(range(12))
    whole = chain_hashes(ids, 4, parent=chain_seed("s"))
    assert chain_hashes(ids[4:], 4, parent=whole[0]) == whole[1:]
    assert block_hash(whole[1], ids[8:]) == whole[2]


@pytest.mark.parametrize("other", ["t", " s", "S"])
def test_salts_separate_equal_prompts(other) -> None:
    assert chain_seed("s") != chain_seed(other)


def test_equal_blocks_under_different_parents_differ() -> None:
    first, second = chain_hashes([1, 2, 1, 2], 2, parent=chain_seed(""))
    assert first != second
    assert len(first) == DIGEST_BYTES


def test_the_hash_is_pinned() -> None:
    """Workers and gateways of different versions share one index: a change here is a wire change."""
    assert chain_hashes([1, 2, 3, 4], 4, parent=chain_seed(""))[0].hex() == "d953ab6845ec2c760efe344ce5073be8"
