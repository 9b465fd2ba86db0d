"""Whole pages in one launch: within a pool (copy-on-write), and between a pool and pinned host memory.

    copy_pages     pool[targets[i]] = pool[sources[i]]
    gather_pages   target[targets[i]] = source[sources[i]]     one of both is pinned host memory

A page is one run of bytes with all layers, so one index per page is enough. Targets are distinct, and in `copy_pages`
none is a source; there a negative index on either side copies nothing.

`gather_pages` is for small pages that are not adjacent. A device reads and writes pinned memory over the bus like its
own (unified addressing; the driver has registered it as mapped). A command to a copy engine takes some microseconds, of
the host's time too, and a page of 16 KiB crosses the bus in a third of one. Larger runs are moved by copy engines,
which take no multiprocessor (`executor.cuda.streams`).

Shapes: pool uint8 [N, page_bytes]; source uint8 [N, page_bytes], target uint8 [M, page_bytes]; pages dense; indices [C]
int64 on the device. Bytes move as words of 8, in `gather_pages` where both sides allow it.

Tiling: program (i, j) of `copy_pages` copies BLOCK words of page i, 32 KiB; each byte is read and written once.
`gather_pages` has few programs, PROGRAMS, because steps run at the same time. Program p moves the p-th block of BLOCK
words of all pages and every PROGRAMS-th after it, so 128 KiB are on the bus at a time, more than it holds.

Source: `gather_pages` as the kernels of SGLang's hierarchical cache, `transfer_kv`.
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


GATHER_BLOCK = 512
"""Words of a program at a time."""

PROGRAMS = 32
WORD = 8


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["sources", "targets"])
def gather_pages_kernel(
    source,
    target,
    sources,
    targets,
    count,
    source_stride,
    target_stride,
    page_words,
    BLOCK: tl.constexpr,
):
    """Every so-many-th block of the pages, from the program's own on."""
    blocks = tl.cdiv(page_words, BLOCK)
    for work in range(tl.program_id(0), count * blocks, tl.num_programs(0)):
        i = work // blocks
        word = (work % blocks) * BLOCK + tl.arange(0, BLOCK)
        origin, destination = tl.load(sources + i), tl.load(targets + i)
        words = tl.load(source + origin * source_stride + word, mask=word < page_words)
        tl.store(target + destination * target_stride + word, words, mask=word < page_words)


def gather_pages(source: Tensor, target: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy pages `sources` [C] of `source` to pages `targets` [C] of `target`."""
    if not len(sources):
        return
    assert source.shape[1] == target.shape[1], f"pages of {source.shape[1]} bytes to pages of {target.shape[1]}"
    assert source.stride(1) == target.stride(1) == 1, f"pages of strides {source.stride()}, {target.stride()}"
    if all(_in_words(pages) for pages in (source, target)):
        source, target = source.view(torch.int64), target.view(torch.int64)
    gather_pages_kernel[(PROGRAMS,)](
        source, target, sources, targets, len(sources), source.stride(0), target.stride(0), source.shape[1],
        BLOCK=GATHER_BLOCK
    )  # fmt: skip


def _in_words(pages: Tensor) -> bool:
    return (pages.shape[1] | pages.stride(0) | pages.data_ptr()) % WORD == 0
