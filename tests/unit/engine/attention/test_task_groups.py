"""Tasks that read the same pages are one group, and are computed to the bit as each of them alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_engine.config import MAX_DRAFT_TOKENS
from tandem_engine.kernels.cpu.attention_work import (
    CHUNK,
    END_MEMBER,
    FIRST_MEMBER,
    MAX_GROUP,
    QUERY,
    SHARED_END,
    TASK_CHUNK,
    TILE,
)
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.attention.backend import AttentionSpec
from tandem_engine.model.attention.cpu import CpuAttention, CpuPlan, PagedQueries
from tandem_engine.model.attention.reference import TorchReferenceBackend
from tandem_testing.forward_builders import (
    NUM_HEADS,
    PLAIN,
    PageDealer,
    Seq,
    make_batch,
    make_pool,
    make_qkv,
)

WINDOW = (AttentionSpec(scale=0.3, window=CHUNK + 200),) * 2
CAPPED = (AttentionSpec(scale=0.3, soft_cap=2.0),) * 2
PREFIX = 2 * CHUNK
ENDS = (PREFIX + 1, PREFIX + 90, PREFIX + 300, PREFIX + TILE)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def decodes(dealer: PageDealer, lengths, *, prefix: int = PREFIX) -> list[Seq]:
    """Decodes of some lengths on the same first `prefix` tokens."""
    first = dealer.decode(prefix).pages
    return [
        Seq(seq_len=length, decode=True, pages=[*first, *dealer.decode(max(length - prefix, 1)).pages])
        for length in lengths
    ]


def queries_of(pool: KvPool, sequences, specs=PLAIN) -> PagedQueries:
    plan = CpuAttention(pool, num_heads=NUM_HEADS, specs=specs).plan(make_batch(sequences, page_size=pool.page_size))
    assert isinstance(plan, CpuPlan)
    assert plan.views[0].paged is not None
    return plan.views[0].paged


def groups_of(queries: PagedQueries) -> list[tuple[list[tuple[int, int]], int]]:
    """The (query, chunk) pairs of each group, and how far they go together."""
    tasks = [(int(task[QUERY]), int(task[TASK_CHUNK])) for task in queries.tasks]
    return [
        ([tasks[member] for member in queries.members[row[FIRST_MEMBER] : row[END_MEMBER]]], int(row[SHARED_END]))
        for row in queries.groups
    ]


def attend(pool: KvPool, sequences, qkv, specs=PLAIN) -> torch.Tensor:
    return CpuAttention(pool, num_heads=NUM_HEADS, specs=specs).plan(make_batch(sequences, page_size=pool.page_size))(
        0, *qkv
    )


def test_common_prefix_is_one_group_for_each_of_its_chunks():
    pool = make_pool(num_pages=200)
    found = groups_of(queries_of(pool, decodes(PageDealer(pool=pool), ENDS)))
    assert found[:2] == [([(query, chunk) for query in range(4)], (chunk + 1) * CHUNK) for chunk in (0, 1)]
    assert sorted(found[2:]) == [([(query, 2)], 0) for query in range(4)]


def test_group_of_attention_tasks_ends_at_a_tile_boundary():
    pool = make_pool(num_pages=200)
    prefix = CHUNK - TILE - 16
    found = groups_of(queries_of(pool, decodes(PageDealer(pool=pool), [CHUNK, CHUNK + 1], prefix=prefix)))
    assert found[0] == ([(0, 0), (1, 0)], CHUNK - 2 * TILE)


def test_short_shared_prefix_forms_no_group():
    pool = make_pool(num_pages=200)
    sequences = decodes(PageDealer(pool=pool), [CHUNK] * 3, prefix=CHUNK // 2 - TILE)
    assert groups_of(queries_of(pool, sequences)) == [([(query, 0)], 0) for query in range(3)]


def test_group_has_so_many_members_at_most():
    pool = make_pool(num_pages=200)
    count = 2 * MAX_GROUP + 1
    found = groups_of(queries_of(pool, decodes(PageDealer(pool=pool), [CHUNK] * count, prefix=CHUNK)))
    assert [len(members) for members, _ in found] == [MAX_GROUP, MAX_GROUP, 1]


def test_all_threads_have_groups():
    pool = make_pool(num_pages=200)
    torch.set_num_threads(2)
    found = groups_of(queries_of(pool, decodes(PageDealer(pool=pool), [CHUNK] * 8, prefix=CHUNK)))
    assert [len(members) for members, _ in found] == [2, 2, 2, 2]


def test_pages_before_a_window_are_not_shared():
    pool = make_pool(num_pages=200)
    sequences = decodes(PageDealer(pool=pool), [PREFIX + 10] * 4)
    found = groups_of(queries_of(pool, sequences, WINDOW))
    assert found[0] == ([(query, 1) for query in range(4)], PREFIX)
    assert all(len(members) == 1 for members, _ in found[1:])


def test_partial_chunk_reader_does_not_split_a_task_group():
    """The second's window begins within chunk 1. Others that read all of it found only this one there."""
    pool = make_pool(num_pages=200)
    sequences = decodes(PageDealer(pool=pool), [PREFIX + 10, PREFIX + 300, PREFIX + 20])
    found = groups_of(queries_of(pool, sequences, WINDOW))
    assert found[0] == ([(0, 1), (2, 1)], PREFIX)
    assert ([(1, 1)], 0) in found


lengths = st.integers(1, 3 * CHUNK + 5)


@settings(deadline=None, max_examples=40)
@given(
    ends=st.lists(st.tuples(lengths, st.integers(0, 2), lengths), min_size=1, max_size=12),
    page_size=st.sampled_from([16, 48]),
    window=st.sampled_from([None, 700]),
)
def test_each_attention_task_is_in_one_group_of_equal_pages(ends, page_size, window):
    """`ends`: length, whose pages the sequence has first, and for how many tokens."""
    width = -(-(3 * CHUNK + 5) // page_size)
    pool = make_pool(page_size=page_size, num_pages=2)
    sequences = []
    for index, (length, prefix, shared) in enumerate(ends):
        pages = 1 + np.arange(width) + width * (3 + index)
        pages[: shared // page_size] = (1 + np.arange(width) + width * prefix)[: shared // page_size]
        sequences.append(Seq(seq_len=length, decode=True, pages=pages[: -(-length // page_size)].tolist()))
    queries = queries_of(pool, sequences, (AttentionSpec(scale=1.0, window=window),) * 2)
    found = groups_of(queries)
    everyone = [task for members, _ in found for task in members]
    assert sorted(everyone) == [(int(task[QUERY]), int(task[TASK_CHUNK])) for task in queries.tasks]
    for members, shared_end in found:
        if len(members) > 1:
            (chunk,) = {chunk for _, chunk in members}
            seen = slice(chunk * CHUNK // page_size, -(-shared_end // page_size))
            assert len({tuple(sequences[query].pages[seen]) for query, _ in members}) == 1
            assert chunk * CHUNK < shared_end <= min(sequences[query].seq_len for query, _ in members)
            assert all(sequences[query].seq_len - (window or CHUNK**2) <= chunk * CHUNK for query, _ in members)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("page_size", [16, 48])
@pytest.mark.parametrize("specs", [PLAIN, WINDOW, CAPPED], ids=["plain", "window", "capped"])
def test_company_on_the_same_pages_does_not_change_a_bit(dtype, page_size, specs):
    pool = make_pool(page_size=page_size, num_pages=4 + 4 * PREFIX // page_size, dtype=dtype)
    dealer = PageDealer(pool=pool)
    sequences = decodes(dealer, ENDS) + decodes(dealer, [700, 720], prefix=CHUNK + 100) + [dealer.decode(600)]
    assert any(len(members) > 1 for members, _ in groups_of_any(pool, sequences, specs))
    qkv = make_qkv(len(sequences), dtype=torch.float32 if dtype.itemsize == 1 else dtype)
    together = attend(pool, sequences, qkv, specs)
    for index, seq in enumerate(sequences):
        alone = attend(pool, [seq], [rows[index : index + 1] for rows in qkv], specs)
        assert torch.equal(alone[0], together[index]), index


def groups_of_any(pool: KvPool, sequences, specs):
    """Also of a pool of float8, whose plan is around another."""
    plan = CpuAttention(pool, num_heads=NUM_HEADS, specs=specs).plan(make_batch(sequences, page_size=pool.page_size))
    inner = plan if isinstance(plan, CpuPlan) else plan.plan
    return groups_of(inner.views[0].paged)


def test_shared_prefix_attends_as_the_reference_does():
    pools = [make_pool(num_pages=200) for _ in range(2)]
    sequences = decodes(PageDealer(pool=pools[0]), ENDS)
    qkv = make_qkv(len(sequences))
    batch = make_batch(sequences)
    expected = TorchReferenceBackend(pools[0], specs=PLAIN).plan(batch)(0, *qkv)
    torch.testing.assert_close(attend(pools[1], sequences, qkv), expected, rtol=1e-5, atol=1e-5)


def test_number_of_threads_does_not_change_a_bit_of_a_group():
    pool = make_pool(num_pages=200)
    sequences = decodes(PageDealer(pool=pool), ENDS)
    qkv = make_qkv(len(sequences))
    alone = attend(pool, sequences, qkv)
    torch.set_num_threads(2)
    assert torch.equal(attend(pool, sequences, qkv), alone)


def test_token_and_its_drafts_go_through_their_pages_together():
    pool = make_pool(num_pages=200)
    drafts = MAX_DRAFT_TOKENS
    pages = PageDealer(pool=pool).decode(CHUNK + 100).pages
    seq = Seq(seq_len=CHUNK + 60, extend_len=1 + drafts, pages=pages)
    batch = replace(make_batch([seq]), draft_lens=(drafts,))
    plan = CpuAttention(pool, num_heads=NUM_HEADS, specs=PLAIN).plan(batch)
    assert isinstance(plan, CpuPlan)
    found = groups_of(plan.views[0].paged)
    assert len(found) < 2 * (1 + drafts)
    assert found[0][1] == CHUNK
