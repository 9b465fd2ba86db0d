"""Whole pages from one memory to another on the device: copy-on-write, and both ends of offloading to the host.

    copy      target[targets[i]] = source[sources[i]]      within the pool, or between two of them
    gather    staging[i]         = pool[pages[i]]          before one transfer to the host by the copy engine
    scatter   pool[pages[i]]     = staging[i]              after one from the host

A page is one run of bytes, all layers of it, so nothing but an index per page is needed; without `sources` or
`targets` they are 0, 1, …. Targets are distinct and none is a source. A negative index on either side copies nothing.

Shapes: memories uint8 [N, page_bytes], dense; indices [C] int64 on the device. Bytes move as words of 8.

Tiling: program (i, j) copies BLOCK words of page i, 32 KiB; each byte is read and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Words of a program."""
WARPS = 8


@triton.jit
def copy_pages_kernel(
    source,
    target,
    sources,
    targets,
    source_stride,
    target_stride,
    page_words,
    LISTED_SOURCES: tl.constexpr,
    LISTED_TARGETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Words [j · BLOCK, (j + 1) · BLOCK) of the i-th page; program (i, j)."""
    i = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    origin, destination = i, i
    if LISTED_SOURCES:
        origin = tl.load(sources + i)
    if LISTED_TARGETS:
        destination = tl.load(targets + i)
    if (origin >= 0) & (destination >= 0):
        words = tl.load(source + origin * source_stride + word, mask=word < page_words)
        tl.store(target + destination * target_stride + word, words, mask=word < page_words)


def copy_pages(source: Tensor, target: Tensor, sources: Tensor | None = None, targets: Tensor | None = None) -> None:
    """Copy pages `sources` of `source` to pages `targets` of `target`, both uint8 [N, page_bytes]."""
    count = len(sources) if sources is not None else len(targets) if targets is not None else len(source)
    if not count:
        return
    assert source.shape[1] == target.shape[1], f"pages of {source.shape[1]} and {target.shape[1]} bytes"
    origin, destination = _as_words(source), _as_words(target)
    copy_pages_kernel[(count, triton.cdiv(origin.shape[1], BLOCK))](
        origin, destination, source if sources is None else sources, target if targets is None else targets,
        origin.stride(0), destination.stride(0), origin.shape[1],
        LISTED_SOURCES=sources is not None, LISTED_TARGETS=targets is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


def gather_pages(pool: Tensor, pages: Tensor, staging: Tensor) -> None:
    """The bytes of `pages` [C] to the first C rows of `staging`."""
    copy_pages(pool, staging, sources=pages)


def scatter_pages(staging: Tensor, pool: Tensor, pages: Tensor) -> None:
    """The first C rows of `staging` to `pages` [C]."""
    copy_pages(staging, pool, targets=pages)


def _as_words(pages: Tensor) -> Tensor:
    """[N, words]: of 8 bytes, or of one where pages do not divide by 8."""
    assert pages.stride(1) == 1, f"pages of strides {pages.stride()}"
    wide = (pages.shape[1] | pages.stride(0) | pages.data_ptr()) % 8 == 0
    return pages.view(torch.int64) if wide else pages
