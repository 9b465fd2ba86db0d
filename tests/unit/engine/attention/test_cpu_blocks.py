"""The kernel for runs of tokens: against float64, and to the bit however its work is cut."""

import pytest
import torch

from tandem_engine.kernels.cpu import threads as team
from tandem_engine.kernels.cpu.block_attention import KEYS
from tandem_engine.kernels.cpu.vectors import PANEL
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.attention import cpu
from tandem_engine.model.attention.backend import AttentionSpec
from tandem_engine.model.attention.cpu import CpuAttention
from tandem_testing import cpu_kernel_reference as reference
from tandem_testing.forward_builders import HEAD_DIM, NUM_HEADS, PLAIN, PageDealer, Seq, make_batch, make_pool, make_qkv

WINDOW = AttentionSpec(scale=0.3, window=KEYS + 9)
CAPPED = AttentionSpec(scale=0.3, soft_cap=2.0)
SPECS = {"plain": PLAIN[0], "window": WINDOW, "capped": CAPPED}


def attend(pool: KvPool, sequences: list[Seq], qkv, spec: AttentionSpec = PLAIN[0]) -> torch.Tensor:
    batch = make_batch(sequences, page_size=pool.page_size)
    return CpuAttention(pool, num_heads=NUM_HEADS, specs=(spec,) * 2).plan(batch)(0, *qkv)


def attend_in_float64(pool: KvPool, seq: Seq, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """After `attend`, which has stored k and v."""
    pages = pool.data[list(seq.pages), 0].double()  # [pages, 2, KV, slot, D]
    keys, values = pages.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : seq.seq_len].numpy()
    found = reference.attention(
        q.double().numpy(), keys, values, scale=spec.scale, window=spec.window, cap=spec.soft_cap
    )
    return torch.from_numpy(found)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("seq_len", "extend_len"), [(1, 1), (KEYS, KEYS), (3 * KEYS + 5, PANEL + 3), (700, 40)])
def test_block_attention_equals_float64_to_float32_precision(spec, page_size, seq_len, extend_len):
    pool = make_pool(page_size=page_size, num_pages=800 // page_size + 2)
    seq = PageDealer(pool=pool).seq(seq_len, extend_len)
    qkv = make_qkv(extend_len)
    out = attend(pool, [seq], qkv, spec)
    assert (out - attend_in_float64(pool, seq, qkv[0], spec)).abs().max() < 2e-6


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("chunk", [17, KEYS, 100])
def test_prompt_in_chunks_has_the_bits_of_one_at_once(spec, chunk):
    total = 4 * KEYS + 21
    pools = [make_pool() for _ in range(2)]
    pages = PageDealer(pool=pools[0]).seq(total).pages
    qkv = make_qkv(total)
    whole = attend(pools[0], [Seq(seq_len=total, extend_len=total, pages=pages)], qkv, spec)
    for begin in range(0, total - chunk, chunk):
        end = begin + chunk
        part = tuple(rows[begin:end] for rows in qkv)
        seq = Seq(seq_len=end, extend_len=chunk, pages=pages)
        assert torch.equal(attend(pools[1], [seq], part, spec), whole[begin:end])


@pytest.fixture
def on_threads():
    """Sets the number of threads, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def prompts():
    pool = make_pool(num_pages=128)
    dealer = PageDealer(pool=pool)
    sequences = [dealer.seq(300, 200), dealer.seq(90, 90), dealer.seq(450, 20)]
    return pool, sequences, make_qkv(310)


def test_neither_threads_nor_the_width_of_tasks_change_a_bit(prompts, on_threads, monkeypatch):
    on_threads(1)
    alone = attend(*prompts)
    monkeypatch.setattr(cpu, "PARALLEL_SCORES", 0)
    for threads, width in ((2, 4), (2, 1), (3, 2)):
        on_threads(threads)
        monkeypatch.setattr(cpu, "MAX_TASK", width)
        assert torch.equal(attend(*prompts), alone), (threads, width)


@pytest.mark.parametrize("make_team", [team.PythonTeam, lambda: None], ids=["python", "torch's"])
def test_either_team_computes_everything_once(prompts, on_threads, monkeypatch, make_team):
    on_threads(1)
    alone = attend(*prompts)
    on_threads(2)
    chosen = make_team() or team.team()
    monkeypatch.setattr(cpu, "PARALLEL_SCORES", 0)
    monkeypatch.setattr(cpu, "team", lambda: chosen)
    assert torch.equal(attend(*prompts), alone)
    assert torch.get_num_threads() == 2


def test_scores_far_apart_equal_reference():
    pool = make_pool()
    pool.data.mul_(100.0)
    seq = PageDealer(pool=pool).seq(200, 30)
    q, k, v = make_qkv(30)
    out = attend(pool, [seq], (q * 30, k, v))
    torch.testing.assert_close(out.double(), attend_in_float64(pool, seq, q * 30, PLAIN[0]), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("side", [0, 1], ids=["K", "V"])
def test_nan_in_a_page_shows_in_the_result(spec, side):
    pool = make_pool()
    seq = PageDealer(pool=pool).seq(100, 20)
    pool.data[seq.pages[70 // 16], 0, side, :, 70 % 16] = torch.nan
    assert attend(pool, [seq], make_qkv(20), spec).isnan().all()


def test_nan_of_one_query_stays_with_it():
    pool = make_pool()
    seq = PageDealer(pool=pool).seq(100, 20)
    q, k, v = make_qkv(20)
    q[7, 2] = torch.nan
    heads = attend(pool, [seq], (q, k, v)).view(20, NUM_HEADS, HEAD_DIM)
    nan = heads.isnan().all(dim=2)
    assert nan.nonzero().tolist() == [[7, 2]]
    assert heads.isnan().any(dim=2).sum() == 1


def test_bfloat16_pages_are_widened_not_rounded_again():
    pool = make_pool(dtype=torch.bfloat16)
    seq = PageDealer(pool=pool).seq(100, 20)
    qkv = make_qkv(20, dtype=torch.bfloat16)
    out = attend(pool, [seq], qkv)
    expected = attend_in_float64(pool, seq, qkv[0], PLAIN[0])
    assert torch.equal(out, expected.float().bfloat16()) or (out - expected).abs().max() < 2**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_size_of_pages_does_not_change_a_bit(dtype):
    """Pairs of keys may lie on two pages, and the last key of an odd count has no other."""
    total = 2 * KEYS + 7
    qkv = make_qkv(total, dtype=dtype)
    found = []
    for page_size in (16, 1, 5, 64):
        pool = make_pool(page_size=page_size, num_pages=total // page_size + 4, dtype=dtype)
        found.append(attend(pool, [PageDealer(pool=pool).seq(total, total)], qkv))
    assert all(torch.equal(each, found[0]) for each in found[1:])


def test_tasks_of_three_heads_for_each_key_fill_their_panels():
    assert cpu.width_of_tasks(cpu.MAX_TASK, 3) * 3 % PANEL == 0
    assert cpu.width_of_tasks(cpu.MAX_TASK, 4) == cpu.MAX_TASK * PANEL // 4
    assert cpu.width_of_tasks(1, 2 * PANEL) == 1
