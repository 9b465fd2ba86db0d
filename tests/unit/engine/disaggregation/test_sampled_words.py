"""Whatever a transfer can do to a page as a whole, a sampled digest sees (T60–T62)."""

import numpy as np
import pytest
import torch

from tandem_engine.disaggregation.digest import PageDigester
from tandem_engine.disaggregation.sampled_words import (
    SLOT_GROUP,
    sampled_digests,
    sampled_digests_torch,
    word_bytes,
)
from tandem_engine.memory.pool import KvPool, PageLayout
from tandem_engine.names import PageId

PAGE = PageId(1)
GENERATIONS = range(1, 51)
"""Each reads other words."""


def make_pool(page_size: int = 16, dtype: torch.dtype = torch.float32, *, head_dim: int = 8, layers: int = 3) -> KvPool:
    pool = KvPool(
        num_pages=4,
        num_layers=layers,
        num_kv_heads=2,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        device="cpu",
    )
    torch.manual_seed(0)
    pool.data.copy_(torch.randn(pool.data.shape))
    return pool


def digest(pool: KvPool, generation: int) -> int:
    return PageDigester(pool).digest([PAGE], room="room", generation=generation, first=0)[0]


def all_notice(pool: KvPool, change) -> bool:
    """Whether the digest of every generation changes with `change(page)`."""
    digester = PageDigester(pool)
    read = [digester.digest([PAGE], room="room", generation=generation, first=0) for generation in GENERATIONS]
    change(pool.data[PAGE])
    after = [digester.digest([PAGE], room="room", generation=generation, first=0) for generation in GENERATIONS]
    return all(one != other for one, other in zip(read, after, strict=True))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_page_that_never_came_is_seen(page_size):
    assert all_notice(make_pool(page_size), lambda page: page.zero_())


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_one_missed_layer_is_seen(layer):
    assert all_notice(make_pool(), lambda page: page[layer].zero_())


@pytest.mark.parametrize("group", [0, 1, 7])
def test_one_missed_group_of_slots_is_seen(group):
    slots = slice(group * SLOT_GROUP, (group + 1) * SLOT_GROUP)
    assert all_notice(make_pool(64), lambda page: page[:, :, :, slots].zero_())


def test_a_page_of_one_token_that_never_came_is_seen_though_the_rest_of_it_is_as_empty_as_before():
    pool = make_pool()
    pool.data[PAGE, :, :, :, 1:].zero_()
    assert all_notice(pool, lambda page: page.zero_())


def test_a_stale_page_is_seen():
    stale = torch.randn(make_pool().data[PAGE].shape)
    assert all_notice(make_pool(), lambda page: page.copy_(stale))


@pytest.mark.parametrize("page_size", [1, 4, 16, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [1, 2, 3, 8])
def test_kernel_and_torch_agree_on_every_layout(page_size, dtype, head_dim):
    pool = make_pool(page_size, dtype, head_dim=head_dim)
    layout, width = pool.layout, word_bytes(pool.layout)
    pages = np.array([3, 1, 1], np.int64)
    keys = np.array([5, 2**64 - 1, 6], np.uint64)
    signed = pool.bytes_view().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[width])
    out = np.empty(3, np.uint64)
    sampled_digests(signed.numpy().view(f"u{width}"), pages, keys, layout.layers, layout.heads, layout.slots, out)
    there = sampled_digests_torch(signed, torch.from_numpy(pages), torch.from_numpy(keys.view(np.int64)), layout)
    assert out.tolist() == there.numpy().view(np.uint64).tolist()


def test_words_are_the_widest_that_divide_a_row():
    assert [word_bytes(PageLayout(1, 1, 1, row)) for row in (256, 12, 6, 3)] == [8, 4, 2, 1]


def test_the_digest_is_fixed_across_versions():
    """Workers of two releases compare digests: this function may only change with the wire format."""
    pool = make_pool(head_dim=2, layers=1)
    pool.data.copy_(torch.arange(pool.data.numel()).view_as(pool.data))
    assert digest(pool, 1) == 7276531249559261319
