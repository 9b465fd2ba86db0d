"""Digests of pages on a CPU. `disaggregation.digest_words` defines them."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tandem_engine.kernels.cpu.jit import compiled, piece

Words = npt.NDArray[Any]
Keys = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]
GOLDEN = 0x9E3779B97F4A7C15

FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Of `mix`."""

_FIRST, _SECOND = np.uint64(FIRST), np.uint64(SECOND)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


def _mix_word(x: np.uint64) -> np.uint64:
    x = (x ^ (x >> _S30)) * _FIRST
    x = (x ^ (x >> _S27)) * _SECOND
    return x ^ (x >> _S31)


mix = piece(_mix_word, inline="always")
"""`_mix_word` for compiled callers."""


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


SLOT_GROUP = 64
"""Slots that share a sample: pages of the usual sizes are one group."""

BLOCK_SAMPLES = 256
"""Samples whose places are known before the first of them is read, so that reads wait for memory together."""

HEAD_BITS, WORD_BITS, FIELD_BITS = 16, 40, 16
"""A place's bits from 16 on choose the head, those from 40 on the word, sixteen each; its lowest bit K or V."""

_SAMPLED_GOLDEN, _ONE = np.uint64(GOLDEN), np.uint64(1)
_HEAD, _WORD, _FIELD_BITS, _FIELD = np.uint64(HEAD_BITS), np.uint64(WORD_BITS), np.uint64(FIELD_BITS), np.uint64(0xFFFF)


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
