"""Digests of every byte: compiled and torch's agree, and see any change."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_engine.base.names import DigestKind, PageId
from tandem_engine.disaggregation.digest import PageDigester
from tandem_engine.disaggregation.digest_words import full_digests_torch
from tandem_engine.kernels.cpu.page_digests import full_digests
from tandem_testing import cpu_kernel_reference as reference
from tandem_testing.digest_pools import digest_pool, signed_words

PAGE = PageId(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [1, 2, 3, 8])
def test_kernel_and_torch_agree_on_every_word_width(dtype, head_dim):
    words = signed_words(digest_pool(4, dtype, head_dim=head_dim))
    pages, keys = np.array([3, 1, 1], np.int64), np.array([5, 2**64 - 1, 6], np.uint64)
    out = np.empty(3, np.uint64)
    unsigned = words.numpy().view(f"u{words.dtype.itemsize}")
    full_digests(unsigned, pages, keys, out)
    plain = [reference.full_digest(unsigned[page].tolist(), int(key)) for page, key in zip(pages, keys, strict=True)]
    assert out.tolist() == plain
    there = full_digests_torch(words, torch.from_numpy(pages), torch.from_numpy(keys.view(np.int64)))
    assert out.tolist() == there.numpy().view(np.uint64).tolist()


def test_full_digests_of_no_pages_are_empty():
    words = signed_words(digest_pool())
    nothing = torch.empty(0, dtype=torch.int64)
    assert len(full_digests_torch(words, nothing, nothing)) == 0


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_change_of_any_bytes_is_seen(data):
    pool = digest_pool(2, layers=1)
    page = pool.page_view(PAGE)

    def digest() -> int:
        return PageDigester(pool).begin([PAGE], room="r", generation=1, first=0, kind=DigestKind.FULL).take()[0]

    before = digest()
    changes = data.draw(
        st.dictionaries(st.integers(0, pool.page_bytes - 1), st.integers(1, 255), min_size=1, max_size=20)
    )
    for byte, flipped in changes.items():
        page[byte] ^= flipped
    assert digest() != before


def test_swapped_words_change_the_digest():
    pool = digest_pool(2, layers=1)
    words = signed_words(pool)[PAGE]
    before = PageDigester(pool).begin([PAGE], room="r", generation=1, first=0, kind=DigestKind.FULL).take()
    words[[0, 1]] = words[[1, 0]]
    assert PageDigester(pool).begin([PAGE], room="r", generation=1, first=0, kind=DigestKind.FULL).take() != before


def test_digest_is_fixed_across_versions():
    """Workers of two releases compare digests: this function may only change with the wire format."""
    pool = digest_pool(head_dim=2, layers=1)
    pool.data.copy_(torch.arange(pool.data.numel()).view_as(pool.data))
    assert (
        PageDigester(pool).begin([PAGE], room="room", generation=1, first=0, kind=DigestKind.FULL).take()[0]
        == 5819634948868153413
    )
