"""Every head of every receiver is written once, with that head's bytes."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_engine.base.names import PageId
from tandem_engine.disaggregation.nixl.layout import Region, describe
from tandem_engine.disaggregation.ranks.slices import can_hold, head_slices, heads_on
from tandem_engine.memory.pool import KvPool

SIZES = (1, 2, 4)
ALL = [
    pytest.param(heads, senders, receivers, id=f"{heads}-heads-{senders}-to-{receivers}")
    for heads, senders, receivers in product((1, 2, 4, 8), SIZES, SIZES)
    if can_hold(heads, senders) and can_hold(heads, receivers)
]


def rank_pools(
    kv_heads: int, size: int, *, layers: int, pages: int, page_size: int, value_width: int | None = None
) -> list[KvPool]:
    return [
        KvPool(
            num_pages=pages,
            num_layers=layers,
            num_kv_heads=len(heads_on(kv_heads, rank=rank, size=size)),
            head_dim=2,
            page_size=page_size,
            dtype=torch.float32,
            device="cpu",
            value_width=value_width,
        )
        for rank in range(size)
    ]


def region(pool: KvPool, address: int) -> Region:
    layout = pool.layout
    return Region(address, pool.page_bytes, pool.num_pages, "DRAM", 0, layout.layers, layout.heads, layout.parts)


@pytest.mark.parametrize(("kv_heads", "senders", "receivers"), ALL)
@settings(deadline=None, max_examples=25)
@given(
    layers=st.integers(1, 3),
    page_size=st.integers(1, 3),
    value_width=st.sampled_from([None, 1]),
    moves=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4, unique_by=lambda m: m[1]),
    data=st.data(),
)
def test_head_plan_writes_every_target_byte_once_and_correctly(
    kv_heads, senders, receivers, layers, page_size, value_width, moves, data
):
    """(page, layer, part, head, slot) each once, whatever ranges of layers it goes by."""
    shape = {"layers": layers, "pages": 6, "page_size": page_size, "value_width": value_width}
    parts = 2 if value_width is None else 1
    whole = torch.arange(6 * layers * parts * kv_heads * page_size * 2, dtype=torch.float32)
    whole = whole.view(6, layers, parts, kv_heads, page_size, 2)
    here = rank_pools(kv_heads, senders, **shape)
    for rank, pool in enumerate(here):
        held = heads_on(kv_heads, rank=rank, size=senders)
        pool.data.copy_(whole[:, :, :, held.start : held.stop])
    there = rank_pools(kv_heads, receivers, **shape)
    written = [torch.zeros(pool.num_pages * pool.page_bytes, dtype=torch.int64) for pool in there]
    cut = data.draw(st.integers(0, layers))
    source, target = ([PageId(page) for page in side] for side in zip(*moves, strict=True))
    for one in head_slices(kv_heads, senders=senders, receivers=receivers):
        sender, receiver = here[one.sender], there[one.receiver]
        for part in (range(cut), range(cut, layers)):
            ranges = describe(region(sender, 1), source, region(receiver, 1), target, part, one.part)
            for (start, size, _), (goal, goal_size, _) in zip(*(side.tolist() for side in ranges), strict=True):
                assert size == goal_size
                piece = sender.bytes_view().view(-1)[start - 1 : start - 1 + size]
                receiver.bytes_view().view(-1)[goal - 1 : goal - 1 + size] = piece
                written[one.receiver][goal - 1 : goal - 1 + size] += 1
    for rank, pool in enumerate(there):
        held = heads_on(kv_heads, rank=rank, size=receivers)
        assert torch.equal(pool.data[target], whole[source][:, :, :, held.start : held.stop])
        count = written[rank].view(pool.num_pages, -1)
        assert bool((count[target] == 1).all())
        assert int(count.sum()) == len(target) * pool.page_bytes


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_equally_many_ranks_send_whole_pages_straight_across(kv_heads, size):
    slices = head_slices(kv_heads, senders=size, receivers=size)
    assert [(one.sender, one.receiver) for one in slices] == [(rank, rank) for rank in range(size)]
    assert all(len(one.part.source) == len(heads_on(kv_heads, rank=0, size=size)) for one in slices)


def test_receivers_of_replicated_head_are_split_among_senders():
    slices = head_slices(1, senders=4, receivers=2)
    assert [(one.sender, one.receiver) for one in slices] == [(0, 0), (2, 1)]


@pytest.mark.parametrize(("kv_heads", "size", "possible"), [(4, 2, True), (2, 4, True), (4, 3, False), (3, 2, False)])
def test_ranks_that_cannot_share_the_heads_evenly_are_refused(kv_heads, size, possible):
    assert can_hold(kv_heads, size) is possible
