"""What the rest of the engine needs of kernels without importing them: device selection, and the stored formats.

`by_triton`: Triton kernels compute on a device, torch and compiled loops on a CPU. It is called where a layer or the
owner of a tensor is built; no layer checks its device elsewhere.

`KvScales`, `to_float8`: K and V in a float8 pool

    stored  = nearest(clamp(x / scale, ±largest))        read back as  stored · scale

with a scale for each K/V head, ties to even, and NaN kept. The kernels (`store_kv`, `rope_store`) store the same bits;
this is the version for a CPU, without Triton. Source: the E4M3 and E5M2 formats of "FP8 Formats for Deep Learning"
(Micikevicius et al. 2022, arXiv 2209.05433).

`PackedWeight`: quantized weights as `quantized_gemm` reads them

    codes    uint8 [N, K] for numbers of eight bits, [N, K / 2] for those of four
    scales   [groups, N], any float type                         g = k // group_size, one group for group_size ≥ K
    zeros    uint8 [groups, N]; None: all in the middle, 8 or 128; always None for float8 and e2m1

    int4, int8   W[n, k] = (code − zero) · scale[g, n]
    float8       W[n, k] = e4m3(code) · scale[g, n]
    e2m1         W[n, k] = e2m1(code) · scale[g, n]                  floating-point numbers of four bits (MXFP4)

A stack of matrices of one kind, such as the experts of a layer, has one more first dimension. Four-bit numbers are
packed so that a kernel moves nothing between lanes: in each run of 2 · depth inputs, byte j holds input j in its lower
half and input depth + j in its upper half. The lower halves of a run are one operand of `depth` inputs, the upper
halves the next. Scales and zeros have their outputs adjacent, because a program reads those of one group and many
outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

TRITON_DEVICES = frozenset({"cuda"})
"""Kinds of devices whose layers are kernels."""


def by_triton(device: torch.device) -> bool:
    """Whether what lies on `device` is computed by kernels."""
    return device.type in TRITON_DEVICES


GatedActivation = Callable[[Tensor], Tensor]
"""[T, 2 * I], gate first, to activation(gate) * up, [T, I]."""


class DeltaWeights(NamedTuple):
    """What a layer of the gated delta rule has besides its projections, float32."""

    conv: Tensor
    """[taps, channels of q, k and v]"""
    decay: Tensor
    """[value heads], -exp(A_log)"""
    bias: Tensor
    """[value heads], of a"""
    norm: Tensor
    """[value_size], of outputs"""
    eps: float


DeltaStep = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, DeltaWeights], Tensor]
"""One token of each of several sequences, as `kernels.triton.delta_step` has it."""


class DeltaKernels(NamedTuple):
    """What a device has for the gated delta rule."""

    step: DeltaStep
    inverse: Callable[[Tensor], Tensor]
    """`kernels.triton.delta_runs.unit_lower_inverse`"""
    walk: Callable[..., Tensor]
    """`kernels.triton.delta_runs.walk_runs`"""


FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


class KvScales(NamedTuple):
    """What K and V of one layer are divided by before they are stored, float32 [KV] each."""

    k: Tensor
    v: Tensor


def to_float8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x [..., KV, D] of any float dtype as `dtype` of float8; `scale` [KV]."""
    largest = torch.finfo(dtype).max
    return (x.float() / scale[:, None]).clamp(-largest, largest).to(dtype)


def from_float8(x: Tensor, scale: Tensor) -> Tensor:
    """The inverse, float32; x [..., KV, D] of float8."""
    return x.float() * scale[:, None]


class HeadNorm(NamedTuple):
    """The norm of q's and k's heads before their rotation."""

    weight: Tensor
    """[H + KV, D], q's heads first; float32 when it is to be applied before rounding."""
    eps: float


class HeadTurn(NamedTuple):
    """How heads are normalized, if they are, and rotated."""

    cos: Tensor
    """[T, R], dense but for the first dimension, for R ≤ D dimensions of a head."""
    signed_sin: Tensor
    """[T, R], as far apart as `cos`; −sin in its first half."""
    norm: HeadNorm | None


INT4, INT8, PACKED_FLOAT8, PACKED_E2M1 = "int4", "int8", "float8", "e2m1"

PAIRED = frozenset({INT4, PACKED_E2M1})
"""Codings of four bits."""

MIDDLES = {INT4: 8, INT8: 128, PACKED_FLOAT8: 0, PACKED_E2M1: 0}
"""Zero points of symmetric formats."""

DEPTHS = (64, 32)
"""Inputs of one multiplication, the larger ones preferred: tensor cores take 16 at a time."""


def depth_for(inputs: int, group_size: int, *, paired: bool) -> int | None:
    """Of a matrix; None where a group is less than any of them, or pairs do not come out even."""
    whole_groups = group_size >= inputs
    for depth in DEPTHS:
        if (whole_groups or group_size % depth == 0) and not (paired and inputs % (2 * depth)):
            return depth
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedWeight:
    """One matrix [outputs, inputs] on a device, or a stack of them."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    coding: str
    """`INT4`, `INT8`, `PACKED_FLOAT8` or `PACKED_E2M1`."""
    inputs: int
    group_size: int
    depth: int

    @classmethod
    def pack(cls, codes: Tensor, scales: Tensor, zeros: Tensor | None, *, coding: str, group_size: int) -> Self:
        """Lay out a matrix that `depth_for` has a depth for.

        Args:
            codes: uint8 [N, K], one number each; bits of float8.
            scales: [N, groups].
            zeros: uint8 [N, groups], or None.
        """
        inputs = codes.shape[1]
        depth = depth_for(inputs, group_size, paired=coding in PAIRED)
        assert depth is not None, f"groups of {group_size} of {inputs} inputs"
        return cls(
            codes=paired(codes, depth) if coding in PAIRED else codes.contiguous(),
            scales=scales.t().contiguous(),
            zeros=None if zeros is None else zeros.t().contiguous(),
            coding=coding,
            inputs=inputs,
            group_size=min(group_size, inputs),
            depth=depth,
        )

    def lean(self) -> Self:
        """The same without zero points, if all lie in the middle."""
        symmetric = self.zeros is not None and bool((self.zeros == MIDDLES[self.coding]).all())
        return replace(self, zeros=None) if symmetric else self

    def room_for(self, count: int) -> Self:
        """A stack of so many matrices like this one, whose numbers are to be `put` there."""
        codes, scales = (part.new_empty(count, *part.shape) for part in (self.codes, self.scales))
        zeros = None if self.zeros is None else self.zeros.new_empty(count, *self.zeros.shape)
        return replace(self, codes=codes, scales=scales, zeros=zeros)

    def put(self, index: int, matrix: Self) -> None:
        """Make `matrix` the one of `index` in this stack, which was made for such as it is."""
        self.codes[index], self.scales[index] = matrix.codes, matrix.scales
        if self.zeros is not None and matrix.zeros is not None:
            self.zeros[index] = matrix.zeros

    def is_like(self, matrix: Self) -> bool:
        """Whether `matrix` could be one of this stack."""
        facts = [
            (each.coding, each.inputs, each.group_size, each.depth, each.scales.dtype, each.zeros is None)
            for each in (self, matrix)
        ]
        return facts[0] == facts[1] and self.codes.shape[1:] == matrix.codes.shape

    @property
    def outputs(self) -> int:
        return self.codes.shape[-2]

    @property
    def step(self) -> int:
        """Inputs that a program reads together."""
        return 2 * self.depth if self.coding in PAIRED else self.depth

    @property
    def nbytes(self) -> int:
        """On the device."""
        return sum(part.nbytes for part in (self.codes, self.scales, self.zeros) if part is not None)


def paired(codes: Tensor, depth: int) -> Tensor:
    """uint8 [N, K] below 16 to dense [N, K / 2], as described at the top of this module."""
    # Dense at once: what is computed from a transposed matrix is one, too.
    runs = codes.contiguous().view(len(codes), -1, 2, depth)
    return torch.bitwise_or(runs[:, :, 0], runs[:, :, 1] << 4).flatten(1)
