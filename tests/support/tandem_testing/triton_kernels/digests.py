"""The digest kernels equal the compiled loops, and become machine code for pages as models have them."""

from itertools import product

import numpy as np
import torch

from tandem_engine.base.names import DigestKind, PageId
from tandem_engine.disaggregation import digest_triton
from tandem_engine.disaggregation.digest import PageDigester
from tandem_engine.disaggregation.digest_words import full_digests_torch, sampled_digests_torch, sampled_rows
from tandem_engine.kernels.cpu.page_digests import full_digests, sampled_digests
from tandem_testing.digest_pools import digest_pool, signed_words
from tandem_testing.triton_kernels.ahead_of_time import ARCHITECTURES, compile_kernel

SHAPES = [(1, 1), (4, 3), (16, 16), (20, 20), (160, 133), (64, 64)]
"""Slots, and how many of them are in use."""


def check_digests_of_all_layouts(device: str) -> None:
    """Compiled loops, torch's operations and the kernels make the same digests."""
    for (slots, used), dtype, head_dim in product(SHAPES, (torch.float32, torch.bfloat16), (1, 3, 64)):
        pool = digest_pool(slots, dtype, head_dim=head_dim)
        layout, words, rows = pool.layout, signed_words(pool), sampled_rows(pool.layout, used)
        unsigned = words.numpy().view(f"u{words.dtype.itemsize}")
        pages, keys = np.array([3, 1, 1], np.int64), np.array([5, 2**64 - 1, 2**63 + 7], np.uint64)
        sampled, full = np.empty(3, np.uint64), np.empty(3, np.uint64)
        row_words = words.shape[1] // layout.rows
        shape = layout.parts, layout.heads, layout.slots, row_words, layout.heads
        sampled_digests(unsigned, pages, keys, rows, *shape, sampled)
        full_digests(unsigned, pages, keys, full)
        there = words.to(device)
        asked = torch.from_numpy(pages).to(device), torch.from_numpy(keys.view(np.int64)).to(device)
        rows_there = torch.from_numpy(rows).to(device)
        for made in (digest_triton.sampled_digests, sampled_digests_torch):
            found = made(there, *asked, layout, rows_there)
            assert found.cpu().numpy().view(np.uint64).tolist() == sampled.tolist(), (made, layout, used, dtype)
        for made in (digest_triton.full_digests, full_digests_torch):
            assert made(there, *asked).cpu().numpy().view(np.uint64).tolist() == full.tolist(), (made, layout, dtype)


def check_a_pool_on_a_device_has_the_digests_of_one_on_a_cpu(device: str) -> None:
    """A pool on the device and one on the CPU have the same digests."""
    here, there = digest_pool(64), digest_pool(64, device=device)
    there.data.copy_(here.data)
    pages = [PageId(3), PageId(1), PageId(2)]
    for kind, tail in product(DigestKind, (0, 20)):
        asked = {"room": "room", "generation": 2, "first": 4, "kind": kind, "tail": tail}
        assert PageDigester(here).digest(pages, **asked) == PageDigester(there).digest(pages, **asked), (kind, tail)


def compile_digests() -> None:
    """Both kernels, in words of 8 and of 2 bytes."""
    for (head_dim, width, pointer), arch in product(((64, 8, "*i64"), (1, 2, "*i16")), ARCHITECTURES):
        pool = digest_pool(16, torch.float32 if width == 8 else torch.bfloat16, head_dim=head_dim)
        page_words = pool.page_bytes // width
        samples = len(sampled_rows(pool.layout, pool.layout.slots))
        sampled = digest_triton.sampled_constants(page_words, width, pool.layout, samples)
        signature = {"words": pointer} | dict.fromkeys(("pages", "keys", "out"), "*i64")
        kernel = digest_triton.sampled_kernel
        compile_kernel(kernel, signature | {"rows": "*i64"}, sampled, arch=arch).assert_fits()
        full = digest_triton.full_constants(width)
        for words in ("i32", "i32:16"):
            compile_kernel(
                digest_triton.full_kernel, signature | {"page_words": words}, full, arch=arch
            ).assert_fits()  # fmt: skip
