"""GPTQ's format: four or eight bits, inputs in groups, in any order (Frantar et al. 2022, arXiv 2210.17323).

    qweight   int32 [inputs · bits / 32, outputs]          scales   [groups, outputs]
    qzeros    int32 [groups, outputs · bits / 32]          g_idx    int32 [inputs], absent: in order

    W[o, i] = (q[i, o] − z[g, o]) · s[g, o]                g = g_idx[i]

The first format ("gptq") stores z − 1; "gptq_v2" stores z.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_engine.model.quantization.groups import FLOATS, checked_order, group_count, require, two
from tandem_engine.model.quantization.levels import Levels
from tandem_engine.model.quantization.packing import unpack
from tandem_engine.model.safetensors_file import StoredTensor

WORDS = frozenset({torch.int32})
INDICES = frozenset({torch.int32, torch.int64})


@dataclass(frozen=True, kw_only=True, slots=True)
class Gptq:
    """Implements `WeightFormat`."""

    bits: int
    group_size: int
    zero_offset: int
    """What is to be added to a stored zero point."""

    @property
    def required(self) -> tuple[str, ...]:
        return ("qweight", "qzeros", "scales")

    @property
    def optional(self) -> tuple[str, ...]:
        return ("g_idx",)

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, int]:
        """See `WeightFormat.shape`."""
        words, outputs = two(parts["qweight"])
        inputs = words * 32 // self.bits
        groups = group_count(inputs, self.group_size, parts["qweight"])
        require(parts, "qweight", (words, outputs), WORDS)
        require(parts, "qzeros", (groups, outputs * self.bits // 32), WORDS)
        require(parts, "scales", (groups, outputs), FLOATS)
        require(parts, "g_idx", (inputs,), INDICES)
        return outputs, inputs

    def levels(self, parts: Mapping[str, Tensor]) -> Levels:
        """See `WeightFormat.levels`."""
        codes, scales = unpack(parts["qweight"], self.bits, dim=0).to(torch.uint8).t(), parts["scales"].t()
        # A stored −1 has all bits set.
        zeros = (unpack(parts["qzeros"], self.bits, dim=1) + self.zero_offset) & ((1 << self.bits) - 1)
        (inputs, groups), order = (codes.shape[1], scales.shape[1]), parts.get("g_idx")
        return Levels(
            bits=self.bits,
            codes=codes,
            scales=scales,
            zeros=zeros.to(torch.uint8).t(),
            group_size=inputs // groups,
            groups=checked_order(order, inputs, groups),
        )
