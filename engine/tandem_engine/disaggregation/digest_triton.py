"""Digests of pages on a device: Triton kernels for both digests of `digest_words`, equal to them to the bit.

    sampled    mix(base + Σ over samples s of mix(word[place(s)] ^ place(s))),  place(s) = mix(base + s · GOLDEN)
    full       mix(base + Σ over words w of fold((word[w] ^ (base + w · GOLDEN))))

with base = mix(key), all modulo 2^64. A sum of integers does not depend on the order, so programs add in any order.

Shapes: words [N, words of a page] signed, of 1 to 8 bytes; pages [n] int64; keys [n] int64, the bits of unsigned ones;
rows [samples] int64; out [n] int64.

Tiling: sampled has one program per page, which reads all of its samples at once, far apart. full has one program per
BLOCK words of a page, each read once, dense; torch adds and mixes the sums of a page's programs.

Pages stay in place; eight bytes per page go to the host. Importing this module requires Triton, which comes with torch
for CUDA. With TRITON_INTERPRET=1 the kernels run on a CPU, which is how they are tested without a device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_engine.disaggregation import digest_words
from tandem_engine.kernels.cpu import page_digests
from tandem_engine.memory.pool import PageLayout

BLOCK = 1024
"""Words that one program of `full_kernel` reads."""

_GOLDEN = tl.constexpr(page_digests.GOLDEN)
_FIRST, _SECOND = tl.constexpr(page_digests.FIRST), tl.constexpr(page_digests.SECOND)
_HEAD_BITS, _WORD_BITS = tl.constexpr(page_digests.HEAD_BITS), tl.constexpr(page_digests.WORD_BITS)
_FIELD_BITS = tl.constexpr(page_digests.FIELD_BITS)
_FOLD_BITS, _TERM_BITS = tl.constexpr(page_digests.FOLD_BITS), tl.constexpr(page_digests.TERM_BITS)


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


@triton.jit
def sampled_kernel(
    words,
    pages,
    keys,
    rows,
    out,
    PAGE_WORDS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    SECOND_PART: tl.constexpr,
    MASK: tl.constexpr,
    SAMPLES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """out[i] = digest of words[pages[i]] under keys[i]; program i. WIDTH: SAMPLES or the power of two above."""
    i = tl.program_id(0)
    page = tl.load(pages + i)
    base = _mix(tl.load(keys + i).to(tl.uint64, bitcast=True))
    s = tl.arange(0, WIDTH)
    live = s < SAMPLES
    place = _mix(base + s.to(tl.uint64) * _GOLDEN)
    head = (place & 1) * SECOND_PART + _chosen(place, _HEAD_BITS, HEADS)
    row = tl.load(rows + s, mask=live, other=0) + head.to(tl.int64) * SLOTS
    index = row * ROW_WORDS + _chosen(place, _WORD_BITS, ROW_WORDS).to(tl.int64)
    word = tl.load(words + page * PAGE_WORDS + index, mask=live, other=0)
    term = _mix(_unsigned(word, MASK) ^ place)
    total = base + tl.sum(tl.where(live, term, tl.zeros_like(term)), axis=0)
    tl.store(out + i, _mix(total).to(tl.int64, bitcast=True))


@triton.jit
def full_kernel(
    words,
    pages,
    keys,
    out,
    page_words,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[i, j] = sum of the terms of words [j * BLOCK, (j + 1) * BLOCK) of words[pages[i]]; program (i, j)."""
    i, j = tl.program_id(0), tl.program_id(1)
    page = tl.load(pages + i)
    base = _mix(tl.load(keys + i).to(tl.uint64, bitcast=True))
    w = j * BLOCK + tl.arange(0, BLOCK)
    live = w < page_words
    word = tl.load(words + page * page_words + w, mask=live, other=0)
    x = _unsigned(word, MASK) ^ (base + w.to(tl.uint64) * _GOLDEN)
    y = (x ^ (x >> _FOLD_BITS)) * _FIRST
    term = y ^ (y >> _TERM_BITS)
    total = tl.sum(tl.where(live, term, tl.zeros_like(term)), axis=0)
    tl.store(out + i * tl.num_programs(1) + j, total.to(tl.int64, bitcast=True))


def sampled_digests(words: Tensor, pages: Tensor, keys: Tensor, layout: PageLayout, rows: Tensor) -> Tensor:
    """As `digest_words.sampled_digests_torch`."""
    out = torch.empty_like(keys)
    if len(pages):
        constants = sampled_constants(words.shape[1], words.dtype.itemsize, layout, len(rows))
        sampled_kernel[(len(pages),)](words, pages, keys, rows, out, **constants)
    return out


def full_digests(words: Tensor, pages: Tensor, keys: Tensor) -> Tensor:
    """As `digest_words.full_digests_torch`."""
    parts = triton.cdiv(words.shape[1], BLOCK)
    sums = torch.empty((len(pages), parts), dtype=torch.int64, device=words.device)
    if len(pages):
        constants = full_constants(words.dtype.itemsize)
        full_kernel[(len(pages), parts)](words, pages, keys, sums, words.shape[1], **constants)
    return digest_words.mix_torch(digest_words.mix_torch(keys) + sums.sum(dim=1))


def sampled_constants(page_words: int, width: int, layout: PageLayout, samples: int) -> dict[str, int]:
    """What `sampled_kernel` is compiled for: pages of so many words of `width` bytes, with so many samples."""
    return {
        "PAGE_WORDS": page_words,
        "ROW_WORDS": page_words // layout.rows,
        "SLOTS": layout.slots,
        "HEADS": layout.heads,
        "SECOND_PART": layout.second_part,
        "MASK": _mask(width),
        "SAMPLES": samples,
        "WIDTH": triton.next_power_of_2(samples),
    }


def full_constants(width: int) -> dict[str, int]:
    """What `full_kernel` is compiled for: words of `width` bytes, of pages or of the heads of one that a peer has."""
    return {"MASK": _mask(width), "BLOCK": BLOCK}


def _mask(width: int) -> int:
    """Of the bits of a word of so many bytes, in an int64."""
    return -1 if width == 8 else (1 << 8 * width) - 1
