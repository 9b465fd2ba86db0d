"""Digests of pages on a device: one Triton kernel for each kind of `digest_words`, equal to it to the bit.

    sampled    sum[i] = Σ over samples s of mix(word[place(s)] ^ place(s)),  place(s) = mix(base[i] + s · GOLDEN)
    full       sum[i] = Σ over words w of fold(word[w] ^ (base[i] + w · GOLDEN))

all modulo 2^64. The host makes base[i] = mix(key[i]) before and mix(base[i] + sum[i]) afterwards, so digests of a whole
push are one copy to the device, one launch and one copy back (`device_digests`). A sum of integers does not depend on
the order, so programs add in any order.

Shapes: words [N, words of a page] signed, of 1 to 8 bytes; table [4, n] int64, whose rows are pages, the bits of bases,
slots in use, and sums, which begin with 0.

Tiling: sampled has one program per page, which reads all of its samples at once, far apart. full has one program per
BLOCK words of a page, each read once, dense, which adds its sum to the page's.

Pages stay in place; eight bytes per page go to the host. Importing this module requires Triton, which comes with torch
for CUDA. With TRITON_INTERPRET=1 the kernels run on a CPU, which is how they are tested without a device.
"""

import triton
import triton.language as tl
from torch import Tensor

from tandem_engine.kernels.cpu import page_digests
from tandem_engine.memory.pool import PageLayout

BLOCK = 1024
"""Words that one program of `full_kernel` reads."""

PAGES, BASES, USED, SUMS = range(4)
"""Rows of a table."""

_BASES, _USED, _SUMS = tl.constexpr(BASES), tl.constexpr(USED), tl.constexpr(SUMS)
_GOLDEN = tl.constexpr(page_digests.GOLDEN)
_FIRST, _SECOND = tl.constexpr(page_digests.FIRST), tl.constexpr(page_digests.SECOND)
_HEAD_BITS, _WORD_BITS = tl.constexpr(page_digests.HEAD_BITS), tl.constexpr(page_digests.WORD_BITS)
_FIELD_BITS = tl.constexpr(page_digests.FIELD_BITS)
_FOLD_BITS, _TERM_BITS = tl.constexpr(page_digests.FOLD_BITS), tl.constexpr(page_digests.TERM_BITS)
_SLOT_GROUP = tl.constexpr(page_digests.SLOT_GROUP)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit
def _chosen(place, bits, count):
    return (((place >> bits) & 0xFFFF) * count) >> _FIELD_BITS


@triton.jit
def _unsigned(word, MASK: tl.constexpr):
    return (word.to(tl.int64) & MASK).to(tl.uint64, bitcast=True)


@triton.jit(do_not_specialize=["count", "first_head", "num_heads"])
def sampled_kernel(
    words,
    table,
    count,
    first_head,
    num_heads,
    PAGE_WORDS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    LAYERS: tl.constexpr,
    LAYER_ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    SECOND_PART: tl.constexpr,
    MASK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The sum of page i, of heads [first_head, first_head + num_heads) of its K and V; program i of `count`."""
    i = tl.program_id(0)
    page = tl.load(table + i)
    base = tl.load(table + _BASES * count + i).to(tl.uint64, bitcast=True)
    used = tl.load(table + _USED * count + i).to(tl.int32)
    groups = (used + _SLOT_GROUP - 1) // _SLOT_GROUP
    s = tl.arange(0, WIDTH)
    live = s < LAYERS * groups
    place = _mix(base + s.to(tl.uint64) * _GOLDEN)
    head = (place & 1) * SECOND_PART + _chosen(place, _HEAD_BITS, num_heads.to(tl.uint64))
    layer = s // groups
    slot = tl.minimum((s - layer * groups + 1) * _SLOT_GROUP, used) - 1
    row = layer * LAYER_ROWS + (first_head + head.to(tl.int32)) * SLOTS + slot
    index = row.to(tl.int64) * ROW_WORDS + _chosen(place, _WORD_BITS, ROW_WORDS).to(tl.int64)
    word = tl.load(words + page * PAGE_WORDS + index, mask=live, other=0)
    term = _mix(_unsigned(word, MASK) ^ place)
    total = tl.sum(tl.where(live, term, tl.zeros_like(term)), axis=0)
    tl.store(table + _SUMS * count + i, total.to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["count"])
def full_kernel(words, table, count, page_words, MASK: tl.constexpr, BLOCK: tl.constexpr):
    """Add the terms of words [j * BLOCK, (j + 1) * BLOCK) of page i to its sum; program (i, j)."""
    i, j = tl.program_id(0), tl.program_id(1)
    page = tl.load(table + i)
    base = tl.load(table + _BASES * count + i).to(tl.uint64, bitcast=True)
    w = j * BLOCK + tl.arange(0, BLOCK)
    live = w < page_words
    word = tl.load(words + page * page_words + w, mask=live, other=0)
    x = _unsigned(word, MASK) ^ (base + w.to(tl.uint64) * _GOLDEN)
    y = (x ^ (x >> _FOLD_BITS)) * _FIRST
    term = y ^ (y >> _TERM_BITS)
    total = tl.sum(tl.where(live, term, tl.zeros_like(term)), axis=0)
    tl.atomic_add(table + _SUMS * count + i, total.to(tl.int64, bitcast=True), sem="relaxed")


def add_samples(words: Tensor, table: Tensor, layout: PageLayout, heads: range) -> None:
    """Queue the sums of sampled digests of these heads."""
    count = table.shape[1]
    constants = sampled_constants(words.shape[1], words.dtype.itemsize, layout)
    sampled_kernel[(count,)](words, table, count, heads.start, len(heads), **constants)


def add_words(words: Tensor, table: Tensor) -> None:
    """Queue the sums of digests of every byte."""
    count, page_words = table.shape[1], words.shape[1]
    constants = full_constants(words.dtype.itemsize)
    full_kernel[(count, triton.cdiv(page_words, BLOCK))](words, table, count, page_words, **constants)


def sampled_constants(page_words: int, width: int, layout: PageLayout) -> dict[str, int]:
    """What `sampled_kernel` is compiled for: pages of so many words of `width` bytes."""
    samples = layout.layers * -(-layout.slots // page_digests.SLOT_GROUP)
    return {
        "PAGE_WORDS": page_words,
        "ROW_WORDS": page_words // layout.rows,
        "LAYERS": layout.layers,
        "LAYER_ROWS": layout.parts * layout.heads * layout.slots,
        "SLOTS": layout.slots,
        "SECOND_PART": layout.second_part,
        "MASK": _mask(width),
        "WIDTH": triton.next_power_of_2(samples),
    }


def full_constants(width: int) -> dict[str, int]:
    """What `full_kernel` is compiled for: words of `width` bytes, of pages or of the heads of one that a peer has."""
    return {"MASK": _mask(width), "BLOCK": BLOCK}


def _mask(width: int) -> int:
    """Of the bits of a word of so many bytes, in an int64."""
    return -1 if width == 8 else (1 << 8 * width) - 1
