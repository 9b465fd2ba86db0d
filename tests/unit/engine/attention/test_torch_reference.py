import pytest
import torch

from tandem_engine.model.attention.backend import AttentionSpec
from tandem_engine.model.attention.reference import TorchReferenceBackend
from tandem_testing.dense_attention import DenseAttend
from tandem_testing.forward_builders import HEAD_DIM, PageDealer, make_batch, make_pool, make_qkv

SCALE = HEAD_DIM**-0.5
SPECS = {
    "plain": AttentionSpec(scale=SCALE),
    "window": AttentionSpec(scale=SCALE, window=6),
    "window of one": AttentionSpec(scale=SCALE, window=1),
    "window over all": AttentionSpec(scale=SCALE, window=23),
    "scale": AttentionSpec(scale=0.7),
    "capped": AttentionSpec(scale=SCALE, soft_cap=1.5),
    "all at once": AttentionSpec(scale=0.7, window=6, soft_cap=1.5),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunks", [(23,), (8, 8, 7), (22, 1), (1,) * 23])
def test_a_prompt_in_chunks_attends_as_one_without_pages(chunks, page_size, spec):
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
