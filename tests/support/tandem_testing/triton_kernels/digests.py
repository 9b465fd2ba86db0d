"""The digest kernels equal the compiled loops, and become machine code for pages as models have them."""

from itertools import product

import numpy as np
import torch

from tandem_engine.base.names import DigestKind, PageId
from tandem_engine.disaggregation import digest_triton
from tandem_engine.disaggregation.device_digests import DeviceDigests
from tandem_engine.disaggregation.digest import PageDigester, keys_of
from tandem_testing.digest_pools import digest_pool, signed_words
from tandem_testing.triton_kernels.ahead_of_time import compile_kernel

SHAPES = [(1, 1), (4, 3), (16, 16), (20, 20), (160, 133), (64, 64)]
"""Slots, and how many of them are in use of the last page."""
PLACE = {"room": "room", "generation": 2, "first": 4}
PARTS = (None, range(1), range(1, 2))
"""Heads of a page: all, and those that a peer's rank may have."""


def check_digests_of_all_layouts(device: str) -> None:
    """Compiled loops and kernels make the same digests: of full and of partial pages, of all heads and of some."""
    for (slots, used), dtype, head_dim, value_width in product(
        SHAPES, (torch.float32, torch.bfloat16), (1, 3, 64), (None, 1)
    ):
        pool = digest_pool(slots, dtype, head_dim=head_dim, value_width=value_width)
        here, there = PageDigester(pool), DeviceDigests(signed_words(pool).to(device), pool.layout)
        pages, tail = np.array([3, 1, 1], np.int64), 0 if used == slots else used
        for kind, heads in product(DigestKind, PARTS):
            made = here.begin([PageId(page) for page in pages.tolist()], **PLACE, kind=kind, tail=tail, heads=heads)
            part = range(pool.layout.heads) if heads is None else heads
            queued = there.queue(kind, pages, keys_of(3, **PLACE), tail, part)
            assert queued.take() == made.take(), (kind, heads, pool.layout, used, dtype)
            assert queued.ready()


def check_of_no_pages_there_are_no_digests(device: str) -> None:
    """As of a prompt that is cached as a whole."""
    pool = digest_pool()
    nothing = np.empty(0, np.int64)
    there = DeviceDigests(signed_words(pool).to(device), pool.layout)
    for kind in DigestKind:
        assert there.queue(kind, nothing, nothing.view(np.uint64), 0, range(2)).take() == ()


def check_a_pool_on_a_device_has_the_digests_of_one_on_a_cpu(device: str) -> None:
    """A pool on the device and one on the CPU have the same digests."""
    here, there = digest_pool(64), digest_pool(64, device=device)
    there.data.copy_(here.data)
    pages = [PageId(3), PageId(1), PageId(2)]
    for kind, tail in product(DigestKind, (0, 20)):
        asked = PLACE | {"kind": kind, "tail": tail}
        both = [PageDigester(pool).begin(pages, **asked).take() for pool in (here, there)]
        assert both[0] == both[1], (kind, tail)


def compile_digests(arch: int) -> None:
    """Both kernels, in words of 8 and of 2 bytes."""
    for head_dim, width, pointer in ((64, 8, "*i64"), (1, 2, "*i16")):
        pool = digest_pool(16, torch.float32 if width == 8 else torch.bfloat16, head_dim=head_dim)
        sampled = digest_triton.sampled_constants(pool.page_bytes // width, width, pool.layout)
        signature = {"words": pointer, "table": "*i64", "count": "i32"}
        heads = dict.fromkeys(("first_head", "num_heads"), "i32")
        compile_kernel(digest_triton.sampled_kernel, signature | heads, sampled, arch=arch).assert_fits()
        full = digest_triton.full_constants(width)
        for words in ("i32", "i32:16"):
            kernel = digest_triton.full_kernel
            compile_kernel(kernel, signature | {"page_words": words}, full, arch=arch).assert_fits()


def compile_digests_that_read_sixteen_bytes_at_once(arch: int) -> None:
    """Of every byte, of pages as models have them: a thread's words come in the widest loads there are."""
    signature = {"words": "*i64:16", "table": "*i64:16", "count": "i32", "page_words": "i32:16"}
    built = compile_kernel(digest_triton.full_kernel, signature, digest_triton.full_constants(8), arch=arch)
    assert "ld.global.v2.b64" in built.ptx, built.what
