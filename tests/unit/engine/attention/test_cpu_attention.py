from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import MAX_DRAFT_TOKENS
from tandem_engine.kernels.cpu.attention_work import CHUNK, as_float32
from tandem_engine.kernels.cpu.jit import compiled
from tandem_engine.kernels.cpu.pieces import compiled_kernel
from tandem_engine.kernels.cpu.tensors import as_array
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.attention import cpu
from tandem_engine.model.attention.cpu import SHORT_EXTEND, CpuAttention
from tandem_engine.model.attention.reference import TorchReferenceBackend
from tandem_testing.forward_builders import NUM_HEADS, PLAIN, PageDealer, Seq, make_batch, make_pool, make_qkv

LAYER = 1


def mixed_sequences(dealer: PageDealer) -> list[Seq]:
    """One of every way to attend."""
    return [
        dealer.seq(20, 20),
        dealer.seq(45, 12),
        dealer.seq(1, 1),
        dealer.seq(40, 1),
        dealer.seq(33 + SHORT_EXTEND, SHORT_EXTEND),
        dealer.decode(1),
        dealer.decode(37),
        dealer.decode(64),
    ]


def attend(pool: KvPool, sequences, qkv, backend_class=None):
    batch = make_batch(sequences, page_size=pool.page_size)
    if backend_class:
        return backend_class(pool, specs=PLAIN).plan(batch)(LAYER, *qkv)
    return CpuAttention(pool, num_heads=NUM_HEADS, specs=PLAIN).plan(batch)(LAYER, *qkv)


def num_tokens(sequences) -> int:
    return sum(seq.extend_len for seq in sequences)


@pytest.mark.parametrize("page_size", [1, 5, 16, 48])
def test_every_kind_of_sequence_attends_as_the_reference_does(page_size):
    pools = [make_pool(page_size=page_size, num_pages=320) for _ in range(2)]
    sequences = mixed_sequences(PageDealer(pool=pools[0]))
    qkv = make_qkv(num_tokens(sequences))
    expected = attend(pools[0], sequences, qkv, TorchReferenceBackend)
    torch.testing.assert_close(attend(pools[1], sequences, qkv), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(pools[0].data, pools[1].data)


def test_float8_pages_attend_as_the_reference_does():
    pools = [make_pool(num_pages=320, dtype=torch.float8_e4m3fn) for _ in range(2)]
    sequences = mixed_sequences(PageDealer(pool=pools[0]))
    qkv = make_qkv(num_tokens(sequences))
    expected = attend(pools[0], sequences, qkv, TorchReferenceBackend)
    torch.testing.assert_close(attend(pools[1], sequences, qkv), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(*(pool.data.view(torch.uint8) for pool in pools))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_kernels_read_every_code_of_float8_as_torch_does(dtype):
    read = compiled_kernel(lambda rows, wide: as_float32(rows, wide).copy())
    codes = torch.arange(256).to(torch.uint8).view(dtype).view(8, 32)
    found = read(as_array(codes), np.empty((8, 32), np.uint32))
    torch.testing.assert_close(torch.from_numpy(found), codes.float(), rtol=0, atol=0, equal_nan=True)


def test_attention_of_drafts_equals_single_token_steps_bitwise():
    drafts = MAX_DRAFT_TOKENS
    pools = [make_pool() for _ in range(2)]
    pages = PageDealer(pool=pools[0]).seq(40 + 1 + drafts, 1 + drafts).pages
    qkv = make_qkv(1 + drafts)
    verified = replace(make_batch([Seq(seq_len=41 + drafts, extend_len=1 + drafts, pages=pages)]), draft_lens=(drafts,))
    together = CpuAttention(pools[0], num_heads=NUM_HEADS, specs=PLAIN).plan(verified)(LAYER, *qkv)
    alone = [
        attend(pools[1], [Seq(seq_len=41 + i, decode=True, pages=pages)], [part[i : i + 1] for part in qkv])
        for i in range(1 + drafts)
    ]
    assert torch.equal(together, torch.cat(alone))


def test_bfloat16_pages_are_read_and_written_as_such():
    pools = [make_pool(dtype=torch.bfloat16) for _ in range(2)]
    sequences = mixed_sequences(PageDealer(pool=pools[0]))
    qkv = make_qkv(num_tokens(sequences), dtype=torch.bfloat16)
    expected = attend(pools[0], sequences, qkv, TorchReferenceBackend)
    result = attend(pools[1], sequences, qkv)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(pools[0].data, pools[1].data)


@pytest.mark.parametrize("page_size", [16, 48])
@pytest.mark.parametrize("seq_len", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 77])
def test_context_cut_into_chunks_is_one_softmax(seq_len, page_size):
    pool = make_pool(page_size=page_size, num_pages=80)
    sequences = [PageDealer(pool=pool).decode(seq_len)]
    qkv = make_qkv(1)
    expected = attend(pool, sequences, qkv, TorchReferenceBackend)
    torch.testing.assert_close(attend(pool, sequences, qkv), expected, rtol=1e-5, atol=1e-5)


def test_scores_far_apart_equal_reference():
    pool = make_pool()
    pool.data.mul_(100.0)
    sequences = [PageDealer(pool=pool).decode(200)]
    qkv = make_qkv(1)
    expected = attend(pool, sequences, qkv, TorchReferenceBackend)
    torch.testing.assert_close(attend(pool, sequences, qkv), expected, rtol=1e-4, atol=1e-3)


def test_company_does_not_change_a_sequence_by_a_bit():
    pool = make_pool(num_pages=128)
    sequences = mixed_sequences(PageDealer(pool=pool))
    qkv = make_qkv(num_tokens(sequences))
    together = attend(pool, sequences, qkv)
    start = 0
    for seq in sequences:
        part = slice(start, start + seq.extend_len)
        alone = attend(pool, [seq], tuple(rows[part] for rows in qkv))
        assert torch.equal(alone, together[part]), seq
        start += seq.extend_len


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setattr(cpu, "PARALLEL_BYTES", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def decodes():
    pool = make_pool(num_pages=160)
    dealer = PageDealer(pool=pool)
    sequences = [dealer.decode(seq_len) for seq_len in (3, 1300, 40, 600)]
    return pool, sequences, make_qkv(4)


def test_number_of_threads_does_not_change_a_bit(decodes, two_threads):
    parallel = attend(*decodes)
    torch.set_num_threads(1)
    assert torch.equal(attend(*decodes), parallel)


def test_pages_of_others_are_neither_read_nor_written():  # [dummy-page]
    pool = make_pool()
    dealer = PageDealer(pool=pool)
    sequences = [dealer.seq(30, 12), dealer.seq(21, 2), dealer.decode(17)]
    mine = [page for seq in sequences for page in seq.pages]
    others = [page for page in range(pool.num_pages) if page not in mine]
    pool.data[others] = torch.nan
    before = pool.data.clone()
    assert attend(pool, sequences, make_qkv(15)).isfinite().all()
    written = ~((pool.data == before) | (pool.data.isnan() & before.isnan()))
    assert not written[others].any()
    assert not written[:, LAYER - 1].any()
    assert written[:, LAYER, :, 0, :, 0].sum() == 2 * 15  # K and V of 15 slots


@pytest.mark.parametrize("side", [0, 1], ids=["K", "V"])
@pytest.mark.parametrize("token", [0, 5, 39])
def test_nan_in_a_page_shows_in_the_result(side, token):
    pool = make_pool()
    seq = PageDealer(pool=pool).decode(41)
    pool.data[seq.pages[token // 16], LAYER, side, :, token % 16] = torch.nan
    assert attend(pool, [seq], make_qkv(1)).isnan().all()


def test_warming_up_leaves_the_pool_alone():
    pool = make_pool()
    before = pool.data.clone()
    CpuAttention(pool, num_heads=NUM_HEADS, specs=PLAIN).warm_up()
    assert torch.equal(pool.data, before)


def test_empty_step_attends_to_nothing():
    assert attend(make_pool(), [], make_qkv(0)).shape == (0, 64)


def test_pool_of_another_dtype_is_refused():
    with pytest.raises(ConfigError, match="float32, bfloat16 or fp8"):
        CpuAttention(make_pool(dtype=torch.float16), num_heads=NUM_HEADS, specs=PLAIN)


def test_kernels_compile_where_no_cache_can_be_written():
    namespace: dict = {}
    exec("def twice(x):\n    return 2 * x", namespace)  # no source file: numba has nowhere to cache
    assert compiled(namespace["twice"])(21) == 42
