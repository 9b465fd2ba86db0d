"""Which words a sampled digest reads, and that every way to read them agrees."""

import numpy as np
import pytest
import torch

from tandem_engine.base.names import PageId
from tandem_engine.disaggregation.digest import PageDigester
from tandem_engine.disaggregation.digest_words import sampled_digests_torch, sampled_rows, word_bytes
from tandem_engine.kernels.cpu.page_digests import SLOT_GROUP, sampled_digests
from tandem_engine.memory.pool import PageLayout
from tandem_testing import cpu_kernel_reference as reference
from tandem_testing.digest_pools import digest_pool, signed_words

PAGE = PageId(1)
GENERATIONS = range(1, 51)
"""Each reads other words."""


def digest(pool, generation: int, tail: int = 0) -> int:
    return PageDigester(pool).begin([PAGE], room="room", generation=generation, first=0, tail=tail).take()[0]


def all_notice(pool, change, tail: int = 0) -> bool:
    """Whether the digest of every generation changes with `change(page)`."""
    digester = PageDigester(pool)

    def all_digests() -> list[int]:
        return [digester.begin([PAGE], room="room", generation=g, first=0, tail=tail).take()[0] for g in GENERATIONS]

    before = all_digests()
    change(pool.data[PAGE])
    return all(one != other for one, other in zip(before, all_digests(), strict=True))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_that_never_came_is_seen(page_size):
    assert all_notice(digest_pool(page_size), lambda page: page.zero_())


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_one_missed_layer_is_seen(layer):
    assert all_notice(digest_pool(), lambda page: page[layer].zero_())


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_one_missed_layer_of_latents_is_seen(layer):
    assert all_notice(digest_pool(value_width=6), lambda page: page[layer].zero_())


@pytest.mark.parametrize("group", [0, 1, 3])
def test_one_missed_group_of_slots_is_seen(group):
    slots = slice(group * SLOT_GROUP, (group + 1) * SLOT_GROUP)
    assert all_notice(digest_pool(256), lambda page: page[:, :, :, slots].zero_())


@pytest.mark.parametrize("used", [1, 5, 16, 17, 63])
def test_sampled_digest_detects_unwritten_page_with_unused_tail(used):
    pool = digest_pool(64)
    pool.data[PAGE, :, :, :, used:].zero_()
    assert all_notice(pool, lambda page: page.zero_(), tail=used)


def test_unused_slots_do_not_affect_sampled_digest():
    pool = digest_pool(64)
    before = digest(pool, 1, tail=20)
    pool.data[PAGE, :, :, :, 20:].zero_()
    assert digest(pool, 1, tail=20) == before


def test_sampled_digest_reads_last_used_slot_of_each_layer():
    layout = PageLayout(layers=2, heads=3, slots=160, row_bytes=8)
    layer = 2 * 3 * 160
    assert sampled_rows(layout, 160).tolist() == [63, 127, 159, layer + 63, layer + 127, layer + 159]
    assert sampled_rows(layout, 65).tolist() == [63, 64, layer + 63, layer + 64]
    assert sampled_rows(layout, 1).tolist() == [0, layer]


@pytest.mark.parametrize(("page_size", "used"), [(1, 1), (4, 3), (16, 16), (20, 20), (160, 133)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [1, 2, 3, 8])
@pytest.mark.parametrize("heads", [range(2), range(1), range(1, 2)], ids=str)
@pytest.mark.parametrize("value_width", [None, 1])
def test_kernel_and_torch_agree_on_every_layout(page_size, used, dtype, head_dim, heads, value_width):
    pool = digest_pool(page_size, dtype, head_dim=head_dim, value_width=value_width)
    layout, words, rows = pool.layout, signed_words(pool), sampled_rows(pool.layout, used, heads.start)
    pages, keys = np.array([3, 1, 1], np.int64), np.array([5, 2**64 - 1, 6], np.uint64)
    out = np.empty(3, np.uint64)
    unsigned = words.numpy().view(f"u{words.dtype.itemsize}")
    row_words = words.shape[1] // layout.rows
    sampled_digests(unsigned, pages, keys, rows, layout.parts, layout.heads, layout.slots, row_words, len(heads), out)
    shape = (layout.layers, layout.parts, layout.heads, layout.slots, row_words)
    plain = [
        reference.sampled_digest(unsigned[page].reshape(shape), rows.tolist(), int(key), heads=len(heads))
        for page, key in zip(pages, keys, strict=True)
    ]
    assert out.tolist() == plain
    places = (torch.from_numpy(pages), torch.from_numpy(keys.view(np.int64)))
    there = sampled_digests_torch(words, *places, layout, torch.from_numpy(rows), len(heads))
    assert out.tolist() == there.numpy().view(np.uint64).tolist()


def test_many_pages_have_the_digests_of_each_alone():
    """More than are located at once."""
    pool = digest_pool(num_pages=200)
    pages = [PageId(page) for page in range(1, 200)]
    digester = PageDigester(pool)
    together = digester.begin(pages, room="room", generation=1, first=0).take()
    alone = [digester.begin([page], room="room", generation=1, first=i).take()[0] for i, page in enumerate(pages)]
    assert [*together] == alone


def test_digest_words_are_widest_that_divide_a_row():
    assert [word_bytes(PageLayout(1, 1, 1, row)) for row in (256, 12, 6, 3)] == [8, 4, 2, 1]


def test_digest_is_fixed_across_versions():
    """Workers of two releases compare digests: this function may only change with the wire format."""
    pool = digest_pool(head_dim=2, layers=1)
    pool.data.copy_(torch.arange(pool.data.numel()).view_as(pool.data))
    assert digest(pool, 1) == 8177654503686700425
