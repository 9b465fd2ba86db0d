"""Float8 weights with a scale for each block: `quant_method: fp8`, as DeepSeek-V3 and Qwen3-FP8 have them.

    weight              float8_e4m3fn [outputs, inputs]
    weight_scale_inv    [⌈outputs / rows⌉, ⌈inputs / columns⌉]        of `weight_block_size` [rows, columns]

    W[o, i] = w[o, i] · s[o / rows, i / columns]

The name is historical: it is multiplied by.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_engine.model.quantization.groups import FLOATS, require, two
from tandem_engine.model.safetensors_file import StoredTensor

FLOAT8 = frozenset({torch.float8_e4m3fn})


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Blocks:
    """Implements `WeightFormat`."""

    rows: int
    columns: int

    @property
    def required(self) -> tuple[str, ...]:
        return ("weight", "weight_scale_inv")

    @property
    def optional(self) -> tuple[str, ...]:
        return ("input_scale",)

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, int]:
        """See `WeightFormat.shape`."""
        outputs, inputs = two(parts["weight"])
        require(parts, "weight", (outputs, inputs), FLOAT8)
        require(parts, "weight_scale_inv", (-(-outputs // self.rows), -(-inputs // self.columns)), FLOATS)
        return outputs, inputs

    def values(self, parts: Mapping[str, Tensor]) -> Tensor:
        """See `WeightFormat.values`."""
        weight = parts["weight"].float()
        outputs, inputs = weight.shape
        scales = parts["weight_scale_inv"].float()
        by_row = scales.repeat_interleave(self.rows, dim=0)[:outputs]
        return weight * by_row.repeat_interleave(self.columns, dim=1)[:, :inputs]
