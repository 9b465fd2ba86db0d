"""Small pools whose pages digests are made of."""

import torch

from tandem_engine.disaggregation.digest_words import word_bytes
from tandem_engine.memory.pool import KvPool

_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def digest_pool(
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    *,
    head_dim: int = 8,
    layers: int = 3,
    num_pages: int = 4,
    device: str = "cpu",
    value_width: int | None = None,
) -> KvPool:
    """A pool of random KV, the same every time; of latents with a `value_width`."""
    pool = KvPool(
        num_pages=num_pages,
        num_layers=layers,
        num_kv_heads=2,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        device=device,
        value_width=value_width,
    )
    pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(0)))
    return pool


def signed_words(pool: KvPool) -> torch.Tensor:
    """The words of its pages as digests read them: [num_pages, words of a page]."""
    return pool.bytes_view().view(_TYPES[word_bytes(pool.layout)])
