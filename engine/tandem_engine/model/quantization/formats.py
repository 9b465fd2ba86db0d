"""Formats of quantized weights: AutoAWQ, float8 blocks, GPTQ, MXFP4.

AutoAWQ "gemm": four bits with zero points, inputs in groups (Lin et al. 2023, arXiv 2306.00978)

    qweight   int32 [inputs, outputs / 8]         qzeros   int32 [groups, outputs / 8]       scales   [groups, outputs]
    W[o, i] = (q[i, o] − z[g, o]) · s[g, o]       g = i // group_size

Eight outputs share a word, in an order that suited the kernel of the first release.

Float8 with a scale per block: `quant_method: fp8`, as DeepSeek-V3 and Qwen3-FP8 have it

    weight              float8_e4m3fn [outputs, inputs]
    weight_scale_inv    [⌈outputs / rows⌉, ⌈inputs / columns⌉]        of `weight_block_size` [rows, columns]
    W[o, i] = w[o, i] · s[o / rows, i / columns]

The name is historical: weights are multiplied by it. compressed-tensors has the same with `strategy: block`, and calls
the scales `weight_scale`.

GPTQ: four or eight bits, inputs in groups, in any order (Frantar et al. 2022, arXiv 2210.17323)

    qweight   int32 [inputs · bits / 32, outputs]          scales   [groups, outputs]
    qzeros    int32 [groups, outputs · bits / 32]          g_idx    int32 [inputs], absent: in order
    W[o, i] = (q[i, o] − z[g, o]) · s[g, o]                g = g_idx[i]

The first format ("gptq") stores z − 1; "gptq_v2" stores z.

MXFP4: floating-point numbers of four bits, 32 inputs to a power of two (OCP Microscaling Formats 1.0), as gpt-oss has
its experts

    blocks    uint8 [outputs, inputs / 32, 16]    two numbers in a byte, the first in its lower half
    scales    uint8 [outputs, inputs / 32]        exponents, 127 more than they are
    W[o, i] = E2M1[code] · 2^(s[o, i / 32] − 127)
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_engine.base.errors import CheckpointError
from tandem_engine.model.checkpoint_files import StoredTensor
from tandem_engine.model.quantization.levels import Levels

FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})


def group_count(inputs: int, group_size: int, tensor: StoredTensor) -> int:
    """Groups of so many inputs, one of all of them for a size of −1. Raises `CheckpointError` for a rest."""
    if group_size == -1:
        return 1
    if inputs % group_size:
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name} has {inputs} inputs, which are no whole number of groups of "
            f"group_size {group_size} in config.json's quantization_config"
        )
    return inputs // group_size


def require(
    parts: Mapping[str, StoredTensor], suffix: str, shape: tuple[int, ...], dtypes: frozenset[torch.dtype]
) -> None:
    """Raise `CheckpointError` when the tensor of `suffix` is there and is not of that shape and one of these dtypes."""
    tensor = parts.get(suffix)
    if tensor is None:
        return
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name} has shape {list(tensor.shape)}; its matrix and config.json's "
            f"quantization_config imply {list(shape)}"
        )
    if tensor.dtype not in dtypes:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise CheckpointError(f"{tensor.path}: tensor {tensor.name} is {tensor.dtype}; expected {names}")


def checked_order(order: Tensor | None, inputs: int, groups: int) -> Tensor | None:
    """int64 [inputs]: the group of each, None where they are in order.

    Raises `ValueError` when `order` names a group that does not exist.
    """
    if order is None:
        return None
    if order.numel() and not (int(order.min()) >= 0 and int(order.max()) < groups):
        raise ValueError(f"its group indices go from {int(order.min())} to {int(order.max())}; it has {groups} groups")
    in_order = torch.arange(inputs, dtype=order.dtype) // (inputs // groups)
    return None if torch.equal(order, in_order) else order.long()


def two(tensor: StoredTensor) -> tuple[int, int]:
    """Both sizes of a matrix. Raises `CheckpointError` when it is none."""
    if len(tensor.shape) != 2:
        raise CheckpointError(f"{tensor.path}: tensor {tensor.name} has shape {list(tensor.shape)}; expected a matrix")
    return tensor.shape[0], tensor.shape[1]


def unpack(words: Tensor, bits: int, *, dim: int) -> Tensor:
    """Unsigned integers of `bits` bits each, int32, in the order in which `words` hold them: lowest bits first.

    `dim` becomes 32 / bits times as long.
    """
    dim %= words.dim()
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    parts = (words.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (words.dim() - dim - 1))) & ((1 << bits) - 1)
    return parts.flatten(dim, dim + 1)


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


BLOCK, BLOCK_BYTES = 32, 16
UINT8 = frozenset({torch.uint8})
MANTISSA_BITS = 7
"""Of bfloat16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mxfp4:
    """Implements `WeightFormat`."""

    @property
    def required(self) -> tuple[str, ...]:
        return ("blocks", "scales")

    @property
    def optional(self) -> tuple[str, ...]:
        return ()

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, int]:
        """See `WeightFormat.shape`. The names of errors are those of the stacks that the experts are in."""
        stored = parts["blocks"]
        if len(stored.shape) != 3 or stored.shape[2] != BLOCK_BYTES:
            raise CheckpointError(
                f"{stored.path}: tensor {stored.name} has blocks of shape {list(stored.shape)} in each expert; "
                f"expected [outputs, inputs / {BLOCK}, {BLOCK_BYTES}]"
            )
        outputs, groups, _ = stored.shape
        require(parts, "blocks", stored.shape, UINT8)
        require(parts, "scales", (outputs, groups), UINT8)
        return outputs, groups * BLOCK

    def levels(self, parts: Mapping[str, Tensor]) -> Levels:
        """See `WeightFormat.levels`. An exponent of 255, which is NaN, becomes infinity, which no reader accepts."""
        blocks = parts["blocks"]
        codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
        # As bits of bfloat16, whose exponents have the same bias; the least power of two is a subnormal number there.
        exponents = parts["scales"].to(torch.int16)
        scales = torch.where(exponents == 0, 1 << MANTISSA_BITS - 1, exponents << MANTISSA_BITS).view(torch.bfloat16)
        return Levels(bits=4, codes=codes, scales=scales, zeros=None, group_size=BLOCK)
