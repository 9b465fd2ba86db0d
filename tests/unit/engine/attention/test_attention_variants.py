"""Windows, chunks, capped scores and scales: every way of the CPU backend against the reference, for any page size."""

from dataclasses import replace

import pytest
import torch

from tandem_engine.kernels.cpu.attention_work import CHUNK
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.attention.backend import AttentionSpec, distinct
from tandem_engine.model.attention.cpu import SHORT_EXTEND, CpuAttention
from tandem_engine.model.attention.reference import TorchReferenceBackend
from tandem_testing.forward_builders import HEAD_DIM, NUM_HEADS, PageDealer, Seq, make_batch, make_pool, make_qkv

LONG_PROMPT = 296
"""Several blocks of queries and of keys."""
SCALE = HEAD_DIM**-0.5
SINKS = torch.tensor([20.0, -20.0, 1.5, 100.0])[:NUM_HEADS]
"""One that takes nearly all the weight, one that takes none, one between, and one that takes all."""
VARIANTS = {
    "window": AttentionSpec(scale=SCALE, window=20),
    "window of one": AttentionSpec(scale=SCALE, window=1),
    "window longer than any": AttentionSpec(scale=SCALE, window=5000),
    "chunks": AttentionSpec(scale=SCALE, chunk=20),
    "chunks of one": AttentionSpec(scale=SCALE, chunk=1),
    "chunks longer than any": AttentionSpec(scale=SCALE, chunk=5000),
    "chunks of many keys": AttentionSpec(scale=SCALE, chunk=100),
    "capped chunks": AttentionSpec(scale=0.3, chunk=33, soft_cap=2.0),
    "sinks, chunks": AttentionSpec(scale=SCALE, chunk=33, sinks=SINKS),
    "scale": AttentionSpec(scale=0.6),
    "capped": AttentionSpec(scale=SCALE, soft_cap=2.0),
    "capped window": AttentionSpec(scale=0.3, window=33, soft_cap=2.0),
    "sinks": AttentionSpec(scale=SCALE, sinks=SINKS),
    "sinks, window": AttentionSpec(scale=SCALE, window=33, sinks=SINKS),
    "sinks, capped": AttentionSpec(scale=SCALE, soft_cap=2.0, sinks=SINKS),
}


def sequences_of(dealer: PageDealer) -> list[Seq]:
    """Every way to attend, around the window's length and far beyond it."""
    return [
        dealer.seq(20, 20),
        dealer.seq(LONG_PROMPT, LONG_PROMPT),
        dealer.seq(150, 60),
        dealer.seq(90, SHORT_EXTEND),
        dealer.seq(21, 1),
        dealer.decode(1),
        dealer.decode(20),
        dealer.decode(21),
        dealer.decode(CHUNK + 10),
    ]


def num_tokens(sequences) -> int:
    return sum(seq.extend_len for seq in sequences)


def attend(pool: KvPool, sequences, qkv, specs, *, layer: int = 0, reference: bool = False):
    batch = make_batch(sequences, page_size=pool.page_size)
    if reference:
        return TorchReferenceBackend(pool, specs=specs).plan(batch)(layer, *qkv)
    return CpuAttention(pool, num_heads=NUM_HEADS, specs=specs).plan(batch)(layer, *qkv)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("spec", VARIANTS.values(), ids=VARIANTS)
def test_every_variant_attends_as_the_reference_does(spec, page_size):
    pools = [make_pool(page_size=page_size, num_pages=1400 // page_size + 40) for _ in range(2)]
    sequences = sequences_of(PageDealer(pool=pools[0]))
    qkv = make_qkv(num_tokens(sequences))
    expected = attend(pools[0], sequences, qkv, (spec, spec), reference=True)
    torch.testing.assert_close(attend(pools[1], sequences, qkv, (spec, spec)), expected, rtol=1e-5, atol=2e-5)
    assert torch.equal(pools[0].data, pools[1].data)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_any_number_of_query_heads_may_share_a_kv_head(kv_heads):
    spec = VARIANTS["capped window"]
    pool = make_pool(num_pages=140, num_kv_heads=kv_heads)
    sequences = sequences_of(PageDealer(pool=pool))
    qkv = make_qkv(num_tokens(sequences), num_kv_heads=kv_heads)
    expected = attend(pool, sequences, qkv, (spec, spec), reference=True)
    torch.testing.assert_close(attend(pool, sequences, qkv, (spec, spec)), expected, rtol=1e-5, atol=2e-5)


def test_bfloat16_pages_with_a_window_and_a_cap():
    spec = VARIANTS["capped window"]
    pools = [make_pool(num_pages=140, dtype=torch.bfloat16) for _ in range(2)]
    sequences = sequences_of(PageDealer(pool=pools[0]))
    qkv = make_qkv(num_tokens(sequences), dtype=torch.bfloat16)
    expected = attend(pools[0], sequences, qkv, (spec, spec), reference=True)
    torch.testing.assert_close(attend(pools[1], sequences, qkv, (spec, spec)), expected, rtol=3e-2, atol=3e-2)


def test_bfloat16_pages_with_sinks():
    spec = VARIANTS["sinks, window"]
    pools = [make_pool(num_pages=140, dtype=torch.bfloat16) for _ in range(2)]
    sequences = sequences_of(PageDealer(pool=pools[0]))
    qkv = make_qkv(num_tokens(sequences), dtype=torch.bfloat16)
    expected = attend(pools[0], sequences, qkv, (spec, spec), reference=True)
    torch.testing.assert_close(attend(pools[1], sequences, qkv, (spec, spec)), expected, rtol=3e-2, atol=3e-2)


def test_sinks_are_those_of_the_layer_itself():
    first = VARIANTS["sinks"]
    pool = make_pool(num_pages=140)
    sequences = sequences_of(PageDealer(pool=pool))
    qkv = make_qkv(num_tokens(sequences))
    for sinks in (SINKS.flip(0).contiguous(), None):
        specs = (first, replace(first, sinks=sinks))
        for layer in range(2):
            expected = attend(pool, sequences, qkv, specs, layer=layer, reference=True)
            torch.testing.assert_close(attend(pool, sequences, qkv, specs, layer=layer), expected, rtol=1e-5, atol=2e-5)


def test_each_layer_attends_by_its_own_spec():
    specs = (VARIANTS["window"], VARIANTS["capped"])
    pool = make_pool(num_pages=140)
    sequences = sequences_of(PageDealer(pool=pool))
    qkv = make_qkv(num_tokens(sequences))
    for layer in range(2):
        expected = attend(pool, sequences, qkv, specs, layer=layer, reference=True)
        torch.testing.assert_close(attend(pool, sequences, qkv, specs, layer=layer), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["window", "capped window", "chunks"])
def test_company_does_not_change_a_windowed_sequence_by_a_bit(name):
    spec = VARIANTS[name]
    pool = make_pool(num_pages=140)
    sequences = sequences_of(PageDealer(pool=pool))
    qkv = make_qkv(num_tokens(sequences))
    together = attend(pool, sequences, qkv, (spec, spec))
    start = 0
    for seq in sequences:
        part = slice(start, start + seq.extend_len)
        alone = attend(pool, [seq], tuple(rows[part] for rows in qkv), (spec, spec))
        assert torch.equal(alone, together[part]), seq
        start += seq.extend_len


def test_pages_before_the_window_are_not_read():
    """NaN there would show if it were masked instead: the work is bounded, not only the result."""
    window, page_size = 20, 4
    spec = AttentionSpec(scale=SCALE, window=window)
    pool = make_pool(page_size=page_size, num_pages=300)
    dealer = PageDealer(pool=pool)
    sequences = [dealer.seq(200, 100), dealer.seq(180, SHORT_EXTEND), dealer.decode(CHUNK + 100)]
    for seq in sequences:
        oldest = seq.seq_len - seq.extend_len + 1 - window
        pool.data[list(seq.pages[: oldest // page_size])] = torch.nan
    out = attend(pool, sequences, make_qkv(num_tokens(sequences)), (spec, spec))
    assert out.isfinite().all()


def test_earlier_chunks_are_not_even_read():
    chunk, page_size = 24, 4
    spec = AttentionSpec(scale=SCALE, chunk=chunk)
    pool = make_pool(page_size=page_size, num_pages=300)
    dealer = PageDealer(pool=pool)
    sequences = [dealer.seq(200, 100), dealer.seq(180, SHORT_EXTEND), dealer.decode(CHUNK + 100)]
    for seq in sequences:
        oldest = (seq.seq_len - seq.extend_len) // chunk * chunk
        pool.data[list(seq.pages[: oldest // page_size])] = torch.nan
    out = attend(pool, sequences, make_qkv(num_tokens(sequences)), (spec, spec))
    assert out.isfinite().all()


def test_window_bounds_the_rows_that_decodes_read():
    pool = make_pool(num_pages=400)
    batch = make_batch([PageDealer(pool=pool).decode(5 * CHUNK)])
    backend = CpuAttention(pool, num_heads=NUM_HEADS, specs=(VARIANTS["window"], VARIANTS["scale"]))
    windowed, full = (view.paged for view in backend.plan(batch).views)
    assert (windowed.rows_read, len(windowed.tasks)) == (20, 1)
    assert (full.rows_read, len(full.tasks)) == (5 * CHUNK, 5)


def test_nan_survives_the_cap():
    pool = make_pool()
    seq = PageDealer(pool=pool).decode(41)
    pool.data[seq.pages[1]] = torch.nan
    assert attend(pool, [seq], make_qkv(1), (VARIANTS["capped"],) * 2).isnan().all()


def test_equal_specs_share_a_plan():
    a, b = VARIANTS["window"], VARIANTS["scale"]
    assert distinct((a, b, AttentionSpec(scale=SCALE, window=20), b)) == ((a, b), (0, 1, 0, 1))


def test_first_token_that_a_window_shows():
    spec = AttentionSpec(scale=1.0, window=3)
    assert [spec.first_seen(position) for position in range(6)] == [0, 0, 0, 1, 2, 3]
    assert AttentionSpec(scale=1.0).first_seen(100) == 0


def test_token_sees_its_chunk_from_its_beginning():
    spec = AttentionSpec(scale=1.0, chunk=3)
    assert [spec.first_seen(position) for position in range(7)] == [0, 0, 0, 3, 3, 3, 6]
