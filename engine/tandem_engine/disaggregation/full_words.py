"""The digest of every byte of a page.

    base    = mix(key)
    x_i     = word_i xor (base + i · GOLDEN), i = 0 … words − 1
    y_i     = (x_i xor x_i >> 32) · FIRST
    digest  = mix(base + Σ (y_i xor y_i >> 29))              all modulo 2^64

Each term is a bijection of its word, so that a change within one word is always seen; of others one in 2^64 is not. The
sum has no order: a CPU makes it with vector instructions, a device in parallel (`device_digests`).
"""

import numpy as np
import torch
from torch import Tensor

from tandem_engine.compiled import compiled
from tandem_engine.disaggregation import word_mixing
from tandem_engine.disaggregation.word_mixing import (
    FIRST,
    GOLDEN,
    Indices,
    Keys,
    Words,
    mix,
    mix_torch,
    shifted,
    signed,
    widened,
)

FOLD_BITS, TERM_BITS = 32, 29

_GOLDEN, _FIRST = np.uint64(GOLDEN), np.uint64(FIRST)
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
            x = np.uint64(page[w]) ^ (base + np.uint64(w) * _GOLDEN)
            y = (x ^ (x >> _FOLD)) * _FIRST
            total += y ^ (y >> _TERM)
        out[i] = mix(total)


full_digests = compiled(_full_digests, made_of=[word_mixing])
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
