import pytest
import torch

from tandem_engine.memory.pool import KvPool
from tandem_engine.model.attention import reference
from tandem_engine.model.attention.backend import AttentionSpec
from tandem_engine.model.attention.reference import TorchReferenceBackend, attend_dense
from tandem_testing.dense_attention import DenseAttend
from tandem_testing.forward_builders import HEAD_DIM, PageDealer, Seq, make_batch, make_pool, make_qkv

SCALE = HEAD_DIM**-0.5
SPECS = {
    "plain": AttentionSpec(scale=SCALE),
    "window": AttentionSpec(scale=SCALE, window=6),
    "window of one": AttentionSpec(scale=SCALE, window=1),
    "window over all": AttentionSpec(scale=SCALE, window=23),
    "chunks": AttentionSpec(scale=SCALE, chunk=6),
    "scale": AttentionSpec(scale=0.7),
    "capped": AttentionSpec(scale=SCALE, soft_cap=1.5),
    "sinks": AttentionSpec(scale=SCALE, sinks=torch.tensor([20.0, -20.0, 1.5, 0.0])),
    "sinks, window": AttentionSpec(scale=SCALE, window=6, sinks=torch.tensor([20.0, -20.0, 1.5, 0.0])),
    "all at once": AttentionSpec(scale=0.7, window=6, soft_cap=1.5),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunks", [(23,), (8, 8, 7), (22, 1), (1,) * 23])
def test_prompt_in_chunks_attends_as_one_without_pages(chunks, page_size, spec):
    pool = make_pool(page_size=page_size)
    backend = TorchReferenceBackend(pool, specs=(spec, spec))
    seq = PageDealer(pool=pool).seq(23)
    qkv = make_qkv(23)
    expected = DenseAttend(extend_lens=[23], specs=(spec,))(0, *qkv)
    seen, parts = 0, []
    for chunk in chunks:
        part = slice(seen, seen + chunk)
        seen += chunk
        batch = make_batch([type(seq)(seq_len=seen, extend_len=chunk, pages=seq.pages)], page_size=page_size)
        parts.append(backend.plan(batch)(0, *(rows[part] for rows in qkv)))
    torch.testing.assert_close(torch.cat(parts), expected)


@pytest.mark.parametrize("scores", [1, 60, 10_000])
def test_prompt_too_long_for_memory_attends_in_parts(scores, monkeypatch):
    pool = make_pool(page_size=4)
    qkv, seq = make_qkv(23), PageDealer(pool=pool).seq(23)
    batch = make_batch([type(seq)(seq_len=23, extend_len=15, pages=seq.pages)], page_size=4)
    backend = TorchReferenceBackend(pool, specs=(SPECS["window"],) * 2)
    backend.plan(make_batch([type(seq)(seq_len=8, extend_len=8, pages=seq.pages)], page_size=4))(
        0, *(rows[:8] for rows in qkv)
    )
    monkeypatch.setattr(reference, "MAX_SCORES", scores)
    expected = DenseAttend(extend_lens=[23], specs=(SPECS["window"],))(0, *qkv)[8:]
    torch.testing.assert_close(backend.plan(batch)(0, *(rows[8:] for rows in qkv)), expected)


NOPE, ROPE, RANK, WIDTH = 12, 4, 20, 10
"""Of MLA: numbers of a head of q without and with positions, of a latent, and of a head of v."""


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("chunks", [(23,), (8, 8, 7), (22, 1)])
def test_absorbed_queries_over_latents_are_expanded_ones(chunks, window):
    """Scores and values of a head are linear in the latent, so its projections may be applied to q and to the sum."""
    heads, draw = 4, torch.Generator().manual_seed(7)
    q = torch.randn(23, heads, NOPE + ROPE, generator=draw)
    latents = torch.randn(23, 1, RANK + ROPE, generator=draw)
    keys_of, values_of = torch.randn(heads, RANK, NOPE, generator=draw), torch.randn(heads, RANK, WIDTH, generator=draw)
    spec = AttentionSpec(scale=(NOPE + ROPE) ** -0.5, window=window, value_width=RANK)
    content, positions = latents[:, 0, :RANK], latents[:, 0, RANK:]
    keys = torch.cat((torch.einsum("sr,hrd->shd", content, keys_of), positions[:, None].expand(-1, heads, -1)), dim=-1)
    expanded = attend_dense(q, keys, torch.einsum("sr,hrd->shd", content, values_of), 0, spec)

    pool = KvPool(
        num_pages=16,
        num_layers=2,
        num_kv_heads=1,
        head_dim=RANK + ROPE,
        page_size=4,
        dtype=torch.float32,
        device="cpu",
        value_width=RANK,
    )
    backend, pages = TorchReferenceBackend(pool, specs=(spec, spec)), PageDealer(pool=pool).seq(23).pages
    absorbed = torch.cat((torch.einsum("thd,hrd->thr", q[..., :NOPE], keys_of), q[..., NOPE:]), dim=-1)
    seen, parts = 0, []
    for chunk in chunks:
        part, seen = slice(seen, seen + chunk), seen + chunk
        batch = make_batch([Seq(seq_len=seen, extend_len=chunk, pages=pages)], page_size=4)
        stored = latents[part]
        parts.append(backend.plan(batch)(1, absorbed[part], stored, stored[..., :RANK]).view(chunk, heads, RANK))
    torch.testing.assert_close(
        torch.einsum("thr,hrd->thd", torch.cat(parts), values_of), expanded, rtol=1e-4, atol=1e-5
    )
