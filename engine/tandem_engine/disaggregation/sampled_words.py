"""Which words of a page a sampled digest reads, and the sum it makes of them.

A page is [layer, 2, kv_head, slot, row]. For each layer and each group of `SLOT_GROUP` slots one word is read, of
K or V, a head, a slot and a place in the row that follow from the page's key: other words for another room,
generation or index. The first group is read at its first slot, which is in use whenever the page is. So

    missed, stale, foreign   every word of every layer is another token's: all samples differ
    torn                     a page is written as one run of bytes; whatever part of it is missing that is as long
                             as a layer holds samples

What it cannot see is a few flipped bits: that takes a digest of every byte.

    base    = mix(key)
    place_s = mix(base + s · GOLDEN), s = 0 … samples − 1
    digest  = mix(base + Σ mix(word_s xor place_s))         all modulo 2^64

The sum has no order, so a device can make it in parallel. `mix` is the finaliser of splitmix64 (Steele, Lea,
Flood: Fast splittable pseudorandom number generators, 2014).
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem_engine.compiled import compiled
from tandem_engine.memory.pool import PageLayout

SLOT_GROUP = 8
"""Slots that share a sample."""

_ONE, _GROUP_SLOTS = np.uint64(1), np.uint64(SLOT_GROUP)

Words = npt.NDArray[Any]
Keys = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_HEAD, _SLOT, _WORD = np.uint64(8), np.uint64(24), np.uint64(40)
_FIELD_BITS = np.uint64(16)
_FIELD = np.uint64(0xFFFF)
"""Sixteen bits of a place choose the head, sixteen the slot, sixteen the word; its lowest bit K or V."""


def word_bytes(layout: PageLayout) -> int:
    """Bytes of the words that are read: the most, up to 8, that divide a row."""
    return next(size for size in (8, 4, 2, 1) if layout.row_bytes % size == 0)


def _mix_word(x: np.uint64) -> np.uint64:
    x = (x ^ (x >> _S30)) * _FIRST
    x = (x ^ (x >> _S27)) * _SECOND
    return x ^ (x >> _S31)


_mix = compiled(_mix_word, inline="always")


def _choose(place: np.uint64, bits: np.uint64, count: np.uint64) -> np.uint64:
    """One of [0, count), from a field of `place`. A product where a remainder would be a division."""
    return (((place >> bits) & _FIELD) * count) >> _FIELD_BITS


_chosen = compiled(_choose, inline="always")


def _sampled_digests(
    words: Words, pages: npt.NDArray[np.int64], keys: Keys, layers: int, heads: int, slots: int, out: Keys
) -> None:
    """out[i] = digest of words[pages[i]] under keys[i].

    All words of a page are located before the first is read: reads that nothing stands between wait for memory
    together, which makes them three times as fast as one by one.

    words  [num_pages, layers * 2 * heads * slots * words of a row], unsigned
    """
    groups = (slots + SLOT_GROUP - 1) // SLOT_GROUP
    samples = layers * groups
    num_heads, num_slots = np.uint64(heads), np.uint64(slots)
    row_words = np.uint64(words.shape[1] // (layers * 2 * heads * slots))
    places, read, where = np.empty(samples, np.uint64), np.empty(samples, np.uint64), np.empty(samples, np.int64)
    for i in range(pages.shape[0]):
        page = words[pages[i]]
        base = _mix(keys[i])
        for sample in range(samples):
            places[sample] = _mix(base + np.uint64(sample) * _GOLDEN)
        for layer in range(layers):
            for group in range(groups):
                sample = layer * groups + group
                place = places[sample]
                first = np.uint64(group * SLOT_GROUP)
                width = _ONE if group == 0 else min(_GROUP_SLOTS, num_slots - first)
                side = np.uint64(2 * layer) + (place & _ONE)
                row = (side * num_heads + _chosen(place, _HEAD, num_heads)) * num_slots
                row += first + _chosen(place, _SLOT, width)
                where[sample] = np.int64(row * row_words + _chosen(place, _WORD, row_words))
        for sample in range(samples):
            read[sample] = page[where[sample]]
        total = base
        for sample in range(samples):
            total += _mix(read[sample] ^ places[sample])
        out[i] = _mix(total)


sampled_digests = compiled(_sampled_digests)
"""`_sampled_digests`, compiled."""


def sampled_digests_torch(words: Tensor, pages: Tensor, keys: Tensor, layout: PageLayout) -> Tensor:
    """The same on any device, as a few operations on all samples at once.

    words  [num_pages, words of a page] int64, or narrower and signed
    pages  [n] int64
    keys   [n] int64, the bits of the unsigned keys
    Returns [n] int64, the bits of the digests.
    """
    row_words = words.shape[1] // layout.rows
    groups = -(-layout.slots // SLOT_GROUP)
    sample = torch.arange(layout.layers * groups, device=words.device)
    layer, first = sample // groups, sample % groups * SLOT_GROUP
    width = (layout.slots - first).clamp_(max=SLOT_GROUP).masked_fill_(first == 0, 1)
    base = _mix_torch(keys)[:, None]
    place = _mix_torch(base + sample * _signed(_GOLDEN))
    side = 2 * layer + (place & 1)
    slot = first + _chosen_torch(place, _SLOT, width)
    head = _chosen_torch(place, _HEAD, layout.heads)
    word = _chosen_torch(place, _WORD, row_words)
    index = ((side * layout.heads + head) * layout.slots + slot) * row_words + word
    read = words[pages[:, None], index].long()
    if words.dtype.itemsize < read.dtype.itemsize:
        read &= (1 << 8 * words.dtype.itemsize) - 1
    return _mix_torch(base.squeeze(1) + _mix_torch(read ^ place).sum(dim=1))


def _mix_torch(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, _S30)) * _signed(_FIRST)
    x = (x ^ _shifted(x, _S27)) * _signed(_SECOND)
    return x ^ _shifted(x, _S31)


def _shifted(x: Tensor, bits: np.uint64) -> Tensor:
    """x >> bits as if unsigned."""
    return (x >> int(bits)) & ((1 << 64 - int(bits)) - 1)


def _chosen_torch(place: Tensor, bits: np.uint64, count: Tensor | int) -> Tensor:
    return (((place >> int(bits)) & int(_FIELD)) * count) >> int(_FIELD_BITS)


def _signed(constant: np.uint64) -> int:
    return int(constant.astype(np.int64))
