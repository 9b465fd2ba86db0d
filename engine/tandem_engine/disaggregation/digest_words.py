"""The arithmetic of page digests: of every byte (full), and of sampled words.

    base    = mix(key)                                                               all modulo 2^64
    full      x_i = word_i xor (base + i · GOLDEN), i = 0 … words − 1;    y_i = (x_i xor x_i >> 32) · FIRST
              digest = mix(base + Σ (y_i xor y_i >> 29))
    sampled   place_s = mix(base + s · GOLDEN), s = 0 … samples − 1
              digest = mix(base + Σ mix(word_s xor place_s))

Sums have no order: a CPU uses vector instructions, a device computes in parallel (`digest_triton`). In a full digest
each term is a bijection of its word, so a change within one word is always detected; of other changes one in 2^64 is
not.

A page is [layer, part, kv_head, slot, row], where the parts are K and V, or one latent. A sampled digest reads one word
of each layer and each group of `SLOT_GROUP` slots: in the last used slot of the group, of a part, a head and a place in
the row that follow from the page's key. The KV of a token depends on all tokens before it, so two sequences that differ
anywhere before the last slot differ in it.
Unless the words that it reads are equal by chance, a sampled digest detects

    missed    a page that was not written, or any layer of it
    torn      a page written in part: every missing layer, so any missing run of two layers' length. Transfers write
              whole pages or whole layers
    stale     KV of another sequence, even of one that begins with the same tokens
    foreign   a page meant for another room, generation or index: its words and its key differ

It does not detect a few flipped bits elsewhere. `mix` is the finalizer of splitmix64 (Steele, Lea, Flood: Fast
splittable pseudorandom number generators, 2014), a bijection. torch has no arithmetic for unsigned integers, so there
the bits are those of signed ones. `kernels.cpu.page_digests` is the same, compiled for a CPU.
"""

import numpy as np
import torch
from torch import Tensor

from tandem_engine.kernels.cpu.page_digests import (
    FIELD_BITS,
    FIRST,
    FOLD_BITS,
    GOLDEN,
    HEAD_BITS,
    SECOND,
    SLOT_GROUP,
    TERM_BITS,
    WORD_BITS,
    Indices,
    Keys,
)
from tandem_engine.memory.pool import PageLayout

_FIRST, _SECOND = np.uint64(FIRST), np.uint64(SECOND)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


def word_bytes(layout: PageLayout) -> int:
    """Bytes of the words that are read: the most, up to 8, that divide a row."""
    return word_bytes_of(layout.row_bytes)


def word_bytes_of(row_bytes: int) -> int:
    """The same for rows of so many bytes."""
    return next(size for size in (8, 4, 2, 1) if row_bytes % size == 0)


def mixed(x: Keys) -> Keys:
    """`mix` of each."""
    x = (x ^ x >> _S30) * _FIRST
    x = (x ^ x >> _S27) * _SECOND
    return x ^ x >> _S31


def mix_torch(x: Tensor) -> Tensor:
    x = (x ^ shifted(x, 30)) * signed(FIRST)
    x = (x ^ shifted(x, 27)) * signed(SECOND)
    return x ^ shifted(x, 31)


def shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits as if unsigned."""
    return (x >> bits) & ((1 << 64 - bits) - 1)


def signed(constant: int) -> int:
    """The 64-bit integer with the bits of an unsigned one."""
    return constant - (1 << 64) if constant >> 63 else constant


def widened(words: Tensor) -> Tensor:
    """Words of any width as int64, as if they were unsigned."""
    bits = 8 * words.dtype.itemsize
    return words.long() if bits == 64 else words.long() & ((1 << bits) - 1)


def full_digests_torch(words: Tensor, pages: Tensor, keys: Tensor) -> Tensor:
    """Digests of every byte on any device, page after page: its intermediate values are as large as a page.

    words  [num_pages, words of a page] int64, or narrower and signed
    pages  [n] int64
    keys   [n] int64, the bits of the unsigned keys
    Returns [n] int64, the bits of the digests.
    """
    weyl = torch.arange(words.shape[1], device=words.device) * signed(GOLDEN)
    bases = mix_torch(keys)
    sums = [_terms(widened(words[page]) ^ (base + weyl)).sum() for page, base in zip(pages, bases, strict=True)]
    return mix_torch(bases + torch.stack(sums)) if sums else bases


def _terms(x: Tensor) -> Tensor:
    y = (x ^ shifted(x, FOLD_BITS)) * signed(FIRST)
    return y ^ shifted(y, TERM_BITS)


def gathered(words: Tensor, pages: Tensor, layout: PageLayout, heads: range) -> Tensor:
    """A copy [n, words of these heads] of some heads of `pages` [n]: they do not lie in one run."""
    by_head = words.view(words.shape[0], layout.layers * layout.parts, layout.heads, -1)
    return by_head[pages, :, heads.start : heads.stop].reshape(len(pages), -1)


def sampled_rows(layout: PageLayout, used: int, first_head: int = 0) -> Indices:
    """Of each sample of a page with `used` slots in use, the row of K and `first_head`: [layers * groups]."""
    slots = np.minimum(np.arange(SLOT_GROUP, used + SLOT_GROUP, SLOT_GROUP), used) - 1
    layers = np.arange(layout.layers) * (layout.parts * layout.heads * layout.slots)
    rows: Indices = (layers[:, None] + first_head * layout.slots + slots).reshape(-1)
    return rows


def sampled_digests_torch(
    words: Tensor, pages: Tensor, keys: Tensor, layout: PageLayout, rows: Tensor, num_heads: int | None = None
) -> Tensor:
    """The same on any device, as a few operations on all samples at once.

    words  [num_pages, words of a page] int64, or narrower and signed
    pages  [n] int64
    keys   [n] int64, the bits of the unsigned keys
    rows   [samples] int64
    num_heads  that may be read, from the one on that `rows` point to; None: all of a page
    Returns [n] int64, the bits of the digests.
    """
    row_words = words.shape[1] // layout.rows
    base = mix_torch(keys)[:, None]
    place = mix_torch(base + torch.arange(len(rows), device=words.device) * signed(GOLDEN))
    head = (place & 1) * layout.second_part + _chosen_torch(place, HEAD_BITS, num_heads or layout.heads)
    index = (rows + head * layout.slots) * row_words + _chosen_torch(place, WORD_BITS, row_words)
    read = widened(words[pages[:, None], index])
    return mix_torch(base.squeeze(1) + mix_torch(read ^ place).sum(dim=1))


def _chosen_torch(place: Tensor, bits: int, count: int) -> Tensor:
    return (((place >> bits) & 0xFFFF) * count) >> FIELD_BITS
