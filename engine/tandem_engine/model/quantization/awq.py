"""AutoAWQ's "gemm" format: four bits with zero points, inputs in groups (Lin et al. 2023, arXiv 2306.00978).

    qweight   int32 [inputs, outputs / 8]         qzeros   int32 [groups, outputs / 8]       scales   [groups, outputs]

    W[o, i] = (q[i, o] − z[g, o]) · s[g, o]       g = i // group_size

Eight outputs share a word, in an order that suited the kernel of the first release.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_engine.model.quantization.groups import FLOATS, group_count, require, two
from tandem_engine.model.quantization.levels import Levels
from tandem_engine.model.quantization.packing import unpack
from tandem_engine.model.safetensors_file import StoredTensor

BITS, PER_WORD = 4, 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in its word each of eight neighbouring outputs is."""
WORDS = frozenset({torch.int32})


@dataclass(frozen=True, kw_only=True, slots=True)
class Awq:
    """Implements `WeightFormat`."""

    group_size: int

    @property
    def required(self) -> tuple[str, ...]:
        return ("qweight", "qzeros", "scales")

    @property
    def optional(self) -> tuple[str, ...]:
        return ()

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, int]:
        """See `WeightFormat.shape`."""
        inputs, words = two(parts["qweight"])
        groups = group_count(inputs, self.group_size, parts["qweight"])
        require(parts, "qweight", (inputs, words), WORDS)
        require(parts, "qzeros", (groups, words), WORDS)
        require(parts, "scales", (groups, words * PER_WORD), FLOATS)
        return words * PER_WORD, inputs

    def levels(self, parts: Mapping[str, Tensor]) -> Levels:
        """See `WeightFormat.levels`."""
        codes, zeros = (_in_order(parts[name]).to(torch.uint8).t() for name in ("qweight", "qzeros"))
        scales = parts["scales"].t()
        return Levels(bits=BITS, codes=codes, scales=scales, zeros=zeros, group_size=codes.shape[1] // scales.shape[1])


def _in_order(words: Tensor) -> Tensor:
    """Unpacked along the last dimension, outputs in their own order."""
    levels = unpack(words, BITS, dim=-1).view(*words.shape, PER_WORD)
    return levels[..., PLACES].flatten(-2)
