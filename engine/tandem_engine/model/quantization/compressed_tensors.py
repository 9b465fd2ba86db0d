"""Weights as the compressed-tensors library stores them: what LLM Compressor and many published checkpoints use.

    pack-quantized     weight_packed  int32 [outputs, inputs · bits / 32], of q + 2^(bits−1)
                       weight_shape   [2]
    int-quantized      weight         int8 [outputs, inputs]
    float-quantized    weight         float8_e4m3fn [outputs, inputs]

    weight_scale       [outputs, groups]; one group for `channel`, a single number for `tensor`
    weight_zero_point  int8 of that shape, packed along the outputs beside packed weights; absent: symmetric
    weight_g_idx       [inputs]; absent: groups in order

    W[o, i] = (q[o, i] − z[o, g]) · s[o, g]

Scales of activations are not used: activations stay in the model's dtype.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from tandem_engine.base.errors import CheckpointError
from tandem_engine.model.checkpoint_files import StoredTensor
from tandem_engine.model.quantization.formats import FLOATS, checked_order, group_count, require, two, unpack
from tandem_engine.model.quantization.levels import Levels

WORDS, BYTES = frozenset({torch.int32}), frozenset({torch.int8})
INDICES = frozenset({torch.int32, torch.int64})
WEIGHTS = BYTES | {torch.float8_e4m3fn}


class Strategy(StrEnum):
    """Which weights share a scale."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    GROUP = "group"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedTensors:
    """Implements `WeightFormat`."""

    bits: int
    packed: bool
    floating: bool
    """float8 instead of integers; tells apart what config.json says, the tensors say it again."""
    strategy: Strategy
    group_size: int
    """−1: all inputs."""

    @property
    def required(self) -> tuple[str, ...]:
        return ("weight_packed" if self.packed else "weight", "weight_scale")

    @property
    def optional(self) -> tuple[str, ...]:
        return ("weight_shape", "weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point", "output_scale")

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, int]:
        """See `WeightFormat.shape`."""
        stored = parts[self.required[0]]
        outputs, width = two(stored)
        inputs = width * 32 // self.bits if self.packed else width
        groups = group_count(inputs, self.group_size, stored)
        require(parts, stored.name.rpartition(".")[2], (outputs, width), WORDS if self.packed else WEIGHTS)
        if self.strategy is Strategy.TENSOR:
            self._require_single(parts)
        else:
            require(parts, "weight_scale", (outputs, groups), FLOATS)
            rows = -(-outputs * self.bits // 32) if self.packed else outputs
            require(parts, "weight_zero_point", (rows, groups), WORDS if self.packed else BYTES)
        require(parts, "weight_g_idx", (inputs,), INDICES)
        return outputs, inputs

    def levels(self, parts: Mapping[str, Tensor]) -> Levels:
        """See `WeightFormat.levels`."""
        codes = self._codes(parts)
        outputs, inputs = codes.shape
        declared = parts.get("weight_shape")
        if declared is not None and declared.tolist() != [outputs, inputs]:
            raise ValueError(f"its weight_shape is {declared.tolist()}, and {[outputs, inputs]} numbers are packed")
        scales = self._by_row(parts["weight_scale"], outputs)
        groups = scales.shape[1]
        return Levels(
            bits=self.bits,
            codes=codes,
            scales=scales,
            zeros=self._zeros(parts, scales),
            group_size=inputs // groups,
            groups=checked_order(parts.get("weight_g_idx"), inputs, groups),
        )

    def _codes(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Integers without a sign."""
        if self.packed:
            return unpack(parts["weight_packed"], self.bits, dim=1).to(torch.uint8)
        weight = parts["weight"]
        return weight if weight.dtype is torch.float8_e4m3fn else (weight.int() + self._middle).to(torch.uint8)

    def _zeros(self, parts: Mapping[str, Tensor], scales: Tensor) -> Tensor | None:
        stored = parts.get("weight_zero_point")
        if not self.packed and parts["weight"].dtype is torch.float8_e4m3fn:
            # Some writers have zero points even there.
            if stored is not None and bool(stored.any()):
                raise ValueError("its weight_zero_point is not zero, which float8 weights do without")
            return None
        if stored is None:
            return torch.full_like(scales, self._middle, dtype=torch.uint8)
        if self.packed and self.strategy is not Strategy.TENSOR:
            return unpack(stored, self.bits, dim=0)[: len(scales)].to(torch.uint8)
        return (self._by_row(stored, len(scales)).int() + self._middle).to(torch.uint8)

    def _by_row(self, numbers: Tensor, outputs: int) -> Tensor:
        """[outputs, groups]"""
        return numbers.reshape(1, 1).expand(outputs, 1) if self.strategy is Strategy.TENSOR else numbers

    @property
    def _middle(self) -> int:
        """Packed numbers are stored without a sign, so much larger."""
        return 1 << (self.bits - 1)

    def _require_single(self, parts: Mapping[str, StoredTensor]) -> None:
        for suffix in ("weight_scale", "weight_zero_point"):
            tensor = parts.get(suffix)
            if tensor is not None and tensor.shape not in ((), (1,), (1, 1)):
                raise CheckpointError(
                    f"{tensor.path}: tensor {tensor.name} has shape {list(tensor.shape)}; strategy tensor in "
                    "config.json's quantization_config implies a single number"
                )
