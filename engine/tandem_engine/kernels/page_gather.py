"""Pages of a pool to pages of the host, and back, in one launch: where pages are small and lie apart.

    target[targets[i]] = source[sources[i]]

One of both is pinned host memory, which a device reads and writes over the bus like memory of its own (unified
addressing; the driver has registered it as mapped). A command to a copy engine takes some microseconds whatever it
moves, of the host's time too, and a page of 16 KiB crosses the bus in a third of one. Larger runs are moved by copy
engines, which take no multiprocessor (`executor.page_streams`).

Shapes: source uint8 [N, page_bytes], target uint8 [M, page_bytes], pages dense; indices [C] int64 on the device,
targets distinct. Bytes move as words of 8 where both sides allow it.

Tiling: PROGRAMS programs, few, as steps are computed beside them. Program p moves the p-th block of BLOCK words of all
pages and every PROGRAMS-th after it, so as many blocks are on the bus at a time: 128 KiB, more than it holds.

Source: as the kernels of SGLang's hierarchical cache, `transfer_kv`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512
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
        source, target, sources, targets, len(sources), source.stride(0), target.stride(0), source.shape[1], BLOCK=BLOCK
    )  # fmt: skip


def _in_words(pages: Tensor) -> bool:
    return (pages.shape[1] | pages.stride(0) | pages.data_ptr()) % WORD == 0
