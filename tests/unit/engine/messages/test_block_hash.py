"""One chain of block hashes for engine, router and gateway."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.messages.kv_events import DIGEST_BYTES, CacheSpace, block_hash, chain_hashes, chain_seed

tokens = st.lists(st.integers(min_value=0, max_value=2**32 - 1), max_size=40)


@given(ids=tokens, extra=tokens, size=st.integers(min_value=1, max_value=8))
def test_prefix_has_the_prefix_of_the_hashes(ids, extra, size) -> None:
    seed = chain_seed("")
    short = chain_hashes(ids, size, parent=seed)
    assert chain_hashes([*ids, *extra], size, parent=seed)[: len(short)] == short
    assert len(short) == len(ids) // size


def test_chain_can_be_continued_from_any_block() -> None:
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


def test_hash_is_pinned() -> None:
    """Workers and gateways of different versions share one index: a change here is a wire change."""
    assert chain_hashes([1, 2, 3, 4], 4, parent=chain_seed(""))[0].hex() == "d953ab6845ec2c760efe344ce5073be8"


@pytest.mark.parametrize(
    ("salt", "seed"), [("", "5147278c4e46c2cac91c504651147ab7"), ("tenant", "b464c12c16edaafc0ac814015d9b760b")]
)
def test_seed_of_the_base_model_is_pinned(salt: str, seed: str) -> None:
    assert CacheSpace(salt).seed.hex() == chain_seed(salt).hex() == seed


digests = st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES).filter(any)


@given(one=st.text(max_size=20), other=st.text(max_size=20), adapter=digests, second=digests)
def test_no_salt_gives_the_seed_of_an_adapter(one: str, other: str, adapter: bytes, second: bytes) -> None:
    spelled = (other, other + adapter.hex(), other + adapter.decode("latin-1"), repr(CacheSpace(other, adapter)))
    seeds = {CacheSpace(salt).seed for salt in (one, *spelled)}
    assert CacheSpace(other, adapter).seed not in seeds
    assert (CacheSpace(one, adapter).seed == CacheSpace(other, second).seed) == ((one, adapter) == (other, second))


@pytest.mark.parametrize("adapter", [b"short", bytes(DIGEST_BYTES), bytes([1] * (DIGEST_BYTES + 1))])
def test_invalid_adapter_digest_has_no_seed(adapter: bytes) -> None:
    with pytest.raises(AssertionError, match="is no digest of an adapter"):
        chain_seed("", adapter)
