"""The arithmetic of page digests, compiled for a CPU and in torch: of every byte (full), and of sampled words.

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
the bits are those of signed ones.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem_engine.kernels.cpu.jit import compiled, piece
from tandem_engine.memory.pool import PageLayout

Words = npt.NDArray[Any]
Keys = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]
GOLDEN = 0x9E3779B97F4A7C15

FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Of `mix`."""

_FIRST, _SECOND = np.uint64(FIRST), np.uint64(SECOND)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


def word_bytes(layout: PageLayout) -> int:
    """Bytes of the words that are read: the most, up to 8, that divide a row."""
    return word_bytes_of(layout.row_bytes)


def word_bytes_of(row_bytes: int) -> int:
    """The same for rows of so many bytes."""
    return next(size for size in (8, 4, 2, 1) if row_bytes % size == 0)


def _mix_word(x: np.uint64) -> np.uint64:
    x = (x ^ (x >> _S30)) * _FIRST
    x = (x ^ (x >> _S27)) * _SECOND
    return x ^ (x >> _S31)


mix = piece(_mix_word, inline="always")
"""`_mix_word` for compiled callers."""


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


FOLD_BITS, TERM_BITS = 32, 29
_FULL_GOLDEN, _FULL_FIRST = np.uint64(GOLDEN), np.uint64(FIRST)
_FOLD, _TERM = np.uint64(FOLD_BITS), np.uint64(TERM_BITS)


def _full_digests(words: Words, pages: Indices, keys: Keys, out: Keys) -> None:
    """out[i] = digest of words[pages[i]] under keys[i].

    words  [num_pages, words of a page], unsigned
    """
    for i in range(pages.shape[0]):
        page = words[pages[i]]
        base = mix(keys[i])
        total = base
        for w in range(page.shape[0]):
            x = np.uint64(page[w]) ^ (base + np.uint64(w) * _FULL_GOLDEN)
            y = (x ^ (x >> _FOLD)) * _FULL_FIRST
            total += y ^ (y >> _TERM)
        out[i] = mix(total)


full_digests = compiled(_full_digests)
"""`_full_digests`, compiled."""


def full_digests_torch(words: Tensor, pages: Tensor, keys: Tensor) -> Tensor:
    """The same on any device, page after page: its intermediate values are as large as a page.

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


SLOT_GROUP = 64
"""Slots that share a sample: pages of the usual sizes are one group."""

BLOCK_SAMPLES = 256
"""Samples whose places are known before the first of them is read, so that reads wait for memory together."""

HEAD_BITS, WORD_BITS, FIELD_BITS = 16, 40, 16
"""A place's bits from 16 on choose the head, those from 40 on the word, sixteen each; its lowest bit K or V."""

_SAMPLED_GOLDEN, _ONE = np.uint64(GOLDEN), np.uint64(1)
_HEAD, _WORD, _FIELD_BITS, _FIELD = np.uint64(HEAD_BITS), np.uint64(WORD_BITS), np.uint64(FIELD_BITS), np.uint64(0xFFFF)


def sampled_rows(layout: PageLayout, used: int, first_head: int = 0) -> Indices:
    """Of each sample of a page with `used` slots in use, the row of K and `first_head`: [layers * groups]."""
    slots = np.minimum(np.arange(SLOT_GROUP, used + SLOT_GROUP, SLOT_GROUP), used) - 1
    layers = np.arange(layout.layers) * (layout.parts * layout.heads * layout.slots)
    rows: Indices = (layers[:, None] + first_head * layout.slots + slots).reshape(-1)
    return rows


def _choose(place: np.uint64, bits: np.uint64, count: np.uint64) -> np.uint64:
    """One of [0, count), from a field of `place`. A product where a remainder would be a division."""
    return (((place >> bits) & _FIELD) * count) >> _FIELD_BITS


_chosen = piece(_choose, inline="always")


def _sampled_digests(
    words: Words,
    pages: Indices,
    keys: Keys,
    rows: Indices,
    parts: int,
    heads: int,
    slots: int,
    row_words: int,
    num_heads: int,
    out: Keys,
) -> None:
    """out[i] = digest of words[pages[i]] under keys[i].

    words  [num_pages, words of a page], unsigned and contiguous
    rows   [samples], of `sampled_rows`
    parts  of a layer, 1 or 2
    num_heads  that may be read, of the page's `heads`, from the one on that `rows` point to
    """
    # One plain loop for each thing that is done to a sample: what only calculates is calculated for several at once,
    # and reads do not wait for each other.
    samples, page_words = rows.shape[0], np.uint64(words.shape[1])
    flat = words.reshape(-1)
    pages_at_once = max(1, BLOCK_SAMPLES // samples)
    readable, num_words = np.uint64(num_heads), np.uint64(row_words)
    side, head_words = np.uint64((parts - 1) * heads * slots * row_words), np.uint64(slots * row_words)
    places, where, read = np.empty((3, pages_at_once * samples), np.uint64)
    for first in range(0, pages.shape[0], pages_at_once):
        count = min(pages_at_once, pages.shape[0] - first)
        for i in range(count):
            base, start = mix(keys[first + i]), np.uint64(pages[first + i]) * page_words
            for s in range(samples):
                places[i * samples + s] = base + np.uint64(s) * _SAMPLED_GOLDEN
                where[i * samples + s] = start + np.uint64(rows[s]) * num_words
        for k in range(count * samples):
            place = mix(places[k])
            offset = (place & _ONE) * side + _chosen(place, _HEAD, readable) * head_words
            where[k] += offset + _chosen(place, _WORD, num_words)
            places[k] = place
        for k in range(count * samples):
            read[k] = flat[where[k]]
        for k in range(count * samples):
            read[k] = mix(read[k] ^ places[k])
        for i in range(count):
            total = mix(keys[first + i])
            for k in range(i * samples, (i + 1) * samples):
                total += read[k]
            out[first + i] = mix(total)


sampled_digests = compiled(_sampled_digests)
"""`_sampled_digests`, compiled."""


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
