"""A quantized matrix in one form, whatever format it was stored in: small numbers, and what each of them is worth.

    integers    W[o, i] = (codes[o, i] − zeros[o, g]) · scales[o, g]          codes and zeros unsigned
    float8      W[o, i] = codes[o, i] · scales[o, g]
    e2m1        W[o, i] = E2M1[codes[o, i]] · scales[o, g]

g is the group of input i: groups of `group_size` inputs in a row, or the one that `groups` names.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Self

import torch
from torch import Tensor

INT8_MIDDLE = 128
"""Zero point of int8 numbers once they are stored without a sign."""

INT8_LARGEST = 127

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Floating-point numbers of four bits by the lower three; the highest is the sign."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Levels:
    """One matrix [outputs, inputs], or a part of one."""

    bits: int
    """2, 4 or 8."""
    codes: Tensor
    """[outputs, inputs], uint8 below 2^bits, or float8_e4m3fn. Without `zeros` four bits are e2m1."""
    scales: Tensor
    """[outputs, number of groups], a floating-point type."""
    zeros: Tensor | None
    """uint8 of the shape of `scales`; None for floating-point codes."""
    group_size: int
    """Inputs of a group; the last group may have less."""
    groups: Tensor | None = None
    """int64 [inputs], for inputs in another order than that of their groups."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def is_float8(self) -> bool:
        return self.zeros is None and self.bits == 8

    @property
    def is_e2m1(self) -> bool:
        return self.zeros is None and self.bits == 4

    def values(self) -> Tensor:
        """float32 [outputs, inputs]: what it is worth."""
        group = self._group_of_inputs()
        scales = self.scales.float()[:, group]
        if self.zeros is None:
            return self._numbers() * scales
        return (self.codes.int() - self.zeros.int()[:, group]) * scales

    def part(self, dim: int, start: int, stop: int) -> "Levels | None":
        """Outputs (dim 0) or inputs (dim 1) [start, stop); None for a range of inputs whose groups lie anywhere.

        Where that cuts a group, groups become smaller, and some have the same scale.
        """
        if (start, stop) == (0, self.shape[dim]):
            return self
        if dim == 0:
            return self.outputs(slice(start, stop))
        if self.groups is not None:
            return None
        codes = self.codes[:, start:stop]
        if self.scales.shape[1] == 1:
            return replace(self, codes=codes, group_size=stop - start)
        ends = 0 if stop == self.shape[1] else stop
        size = gcd(self.group_size, start, ends)
        within = torch.arange(start // size, -(-stop // size), device=codes.device) * size // self.group_size
        zeros = None if self.zeros is None else self.zeros[:, within]
        return replace(self, codes=codes, scales=self.scales[:, within], zeros=zeros, group_size=size)

    def outputs(self, which: "slice | Tensor") -> "Levels":
        """Some of the outputs, or in the order of int64 indices."""
        zeros = None if self.zeros is None else self.zeros[which]
        # Not every device indexes float8.
        codes = self.codes.view(torch.uint8)[which].view(self.codes.dtype)
        return replace(self, codes=codes, scales=self.scales[which], zeros=zeros)

    def padded(self, outputs: int) -> "Levels":
        """With outputs of nothing but zeros behind, so that there are so many."""
        missing = outputs - self.shape[0]
        if missing == 0:
            return self
        codes = torch.zeros((missing, self.shape[1]), dtype=torch.uint8, device=self.codes.device)
        scales = self.scales.new_zeros((missing, self.scales.shape[1]))
        zeros = None
        if self.zeros is not None:
            # In the middle: what is symmetric stays so.
            middle = 1 << (self.bits - 1)
            zeros = torch.cat((self.zeros, torch.full_like(scales, middle, dtype=torch.uint8)))
        codes = torch.cat((self.codes.view(torch.uint8), codes)).view(self.codes.dtype)
        return replace(self, codes=codes, scales=torch.cat((self.scales, scales)), zeros=zeros)

    @classmethod
    def stacked(cls, parts: Sequence["Levels"]) -> "Levels | None":
        """Matrices of the same inputs one below the other; None where they are of different kinds."""
        first = parts[0]
        if len(parts) == 1:
            return first
        if not all(first._is_like(other) for other in parts[1:]):
            return None
        zeros = [part.zeros for part in parts if part.zeros is not None]
        return replace(
            first,
            codes=torch.cat([part.codes for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            zeros=torch.cat(zeros) if zeros else None,
        )

    def to(self, device: torch.device) -> Self:
        """The same there."""
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
            groups=None if self.groups is None else self.groups.to(device),
        )

    def zeros_are(self, value: int) -> bool:
        """Whether all zero points are the same, as in symmetric formats."""
        return self.zeros is not None and bool((self.zeros == value).all())

    def sorted(self) -> "tuple[Levels, Tensor] | None":
        """The same with its inputs in the order of their groups, and int64 [inputs]: which input is where.

        None where groups are of unequal size.
        """
        assert self.groups is not None, "its inputs are in order"
        sizes = torch.bincount(self.groups, minlength=self.scales.shape[1])
        if not bool((sizes == self.group_size).all()):
            return None
        order = self.groups.argsort(stable=True)
        return replace(self, codes=self.codes[:, order], groups=None), order

    def is_sound(self) -> bool:
        """Whether all that it is worth is finite. Looks at scales and codes, not at products: those are float32."""
        sound = bool(torch.isfinite(self.scales).all())
        return sound and not (self.is_float8 and bool(torch.isnan(self.codes.float()).any()))

    def _numbers(self) -> Tensor:
        """float32, of floating-point codes."""
        if self.is_float8:
            return self.codes.float()
        table = torch.tensor((*E2M1, *(-number for number in E2M1)), device=self.codes.device)
        return table[self.codes.int()]

    def _group_of_inputs(self) -> Tensor:
        if self.groups is not None:
            return self.groups
        return torch.arange(self.shape[1], device=self.codes.device) // self.group_size

    def _is_like(self, other: "Levels") -> bool:
        kinds = [(each.bits, each.zeros is None, each.group_size) for each in (self, other)]
        same_kind = kinds[0] == kinds[1]
        same_shape = self.shape[1] == other.shape[1] and self.scales.shape[1] == other.scales.shape[1]
        if self.groups is None or other.groups is None:
            same_order = self.groups is other.groups
        else:
            same_order = torch.equal(self.groups, other.groups)
        return same_kind and same_shape and same_order and self.scales.dtype is other.scales.dtype


def int8_levels(matrix: Tensor) -> Levels:
    """A plain matrix rounded to int8, symmetric, a float32 scale for each output: at most half a scale off anywhere."""
    matrix = matrix.float()
    largest = matrix.abs().amax(dim=1, keepdim=True)
    # A row of zeros stays one; any scale would do.
    scales = torch.where(largest > 0, largest / INT8_LARGEST, 1.0)
    codes = (matrix / scales).round_().add_(INT8_MIDDLE).to(torch.uint8)
    zeros = torch.full_like(scales, INT8_MIDDLE, dtype=torch.uint8)
    return Levels(bits=8, codes=codes, scales=scales, zeros=zeros, group_size=matrix.shape[1])
