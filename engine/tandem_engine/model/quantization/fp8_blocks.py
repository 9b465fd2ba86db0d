"""Float8 weights with a scale for each block: `quant_method: fp8`, as DeepSeek-V3 and Qwen3-FP8 have them.

    weight              float8_e4m3fn [outputs, inputs]
    weight_scale_inv    [⌈outputs / rows⌉, ⌈inputs / columns⌉]        of `weight_block_size` [rows, columns]

    W[o, i] = w[o, i] · s[o / rows, i / columns]

The name is historical: it is multiplied by. compressed-tensors has the same with `strategy: block`, and calls the
scales `weight_scale`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_engine.model.quantization.groups import FLOATS, require, two
from tandem_engine.model.quantization.levels import Levels
from tandem_engine.model.safetensors_file import StoredTensor

FLOAT8 = frozenset({torch.float8_e4m3fn})


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Blocks:
    """Implements `WeightFormat`."""

    rows: int
    columns: int
    scales: str = "weight_scale_inv"
    """Suffix of their tensor."""

    @property
    def required(self) -> tuple[str, ...]:
        return ("weight", self.scales)

    @property
    def optional(self) -> tuple[str, ...]:
        return ("input_scale",)

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, int]:
        """See `WeightFormat.shape`."""
        outputs, inputs = two(parts["weight"])
        require(parts, "weight", (outputs, inputs), FLOAT8)
        require(parts, self.scales, (-(-outputs // self.rows), -(-inputs // self.columns)), FLOATS)
        return outputs, inputs

    def levels(self, parts: Mapping[str, Tensor]) -> Levels:
        """See `WeightFormat.levels`."""
        codes = parts["weight"]
        scales = parts[self.scales].repeat_interleave(self.rows, dim=0)[: len(codes)]
        return Levels(bits=8, codes=codes, scales=scales, zeros=None, group_size=self.columns)
