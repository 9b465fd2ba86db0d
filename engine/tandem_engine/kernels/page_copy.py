"""Whole pages of a pool to other pages of it: copy-on-write.

    pool[targets[i]] = pool[sources[i]]

A page is one run of bytes, all layers of it, so nothing but an index per page is needed. Targets are distinct and none
is a source. A negative index on either side copies nothing. Pages that go to the host or come from there are moved by
copy engines, or by `page_gather` (`executor.page_streams`).

Shapes: pool uint8 [N, page_bytes], dense; indices [C] int64 on the device. Bytes move as words of 8.

Tiling: program (i, j) copies BLOCK words of page i, 32 KiB; each byte is read and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Words of a program."""
WARPS = 8


@triton.jit(do_not_specialize_on_alignment=["sources", "targets"])
def copy_pages_kernel(
    pool,
    sources,
    targets,
    page_stride,
    page_words,
    BLOCK: tl.constexpr,
):
    """Words [j · BLOCK, (j + 1) · BLOCK) of the i-th page; program (i, j)."""
    i = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    origin, destination = tl.load(sources + i), tl.load(targets + i)
    if (origin >= 0) & (destination >= 0):
        words = tl.load(pool + origin * page_stride + word, mask=word < page_words)
        tl.store(pool + destination * page_stride + word, words, mask=word < page_words)


def copy_pages(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy pages `sources` [C] of `pool` to its pages `targets` [C]."""
    if not len(sources):
        return
    words = _as_words(pool)
    copy_pages_kernel[(len(sources), triton.cdiv(words.shape[1], BLOCK))](
        words, sources, targets, words.stride(0), words.shape[1], BLOCK=BLOCK, num_warps=WARPS
    )


def _as_words(pages: Tensor) -> Tensor:
    """[N, words]: of 8 bytes, or of one where pages do not divide by 8."""
    assert pages.stride(1) == 1, f"pages of strides {pages.stride()}"
    wide = (pages.shape[1] | pages.stride(0) | pages.data_ptr()) % 8 == 0
    return pages.view(torch.int64) if wide else pages
