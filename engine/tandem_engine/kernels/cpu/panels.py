"""Weights in panels (`kernels.cpu.gemm`), and projections by them.

oneDNN reorders the weights of a projection into this layout on x86 (`PackedLinear`). So large weights are in memory
once: oneDNN multiplies many tokens by them, these kernels few. oneDNN does not guarantee the layout, so `in_place`
checks it for every weight; with another layout `panel_linear` returns None, and the step kernel needs a packed copy.

`PanelLinear` is a projection of few tokens by these panels. With few tokens a projection is bound by the memory
bandwidth of its weight, in oneDNN as well. But oneDNN's results may depend on the number of tokens; these do not, here
and in the step kernel.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem_engine.kernels.cpu.gemm import OUTPUTS, PARALLEL_BYTES, PRODUCT, ROW_BYTES, WORD_BYTES, build_product_kernel
from tandem_engine.kernels.cpu.pieces import Array
from tandem_engine.kernels.cpu.tensors import as_numbers, dtype_of
from tandem_engine.kernels.cpu.threads import team


@dataclass(frozen=True, kw_only=True, slots=True)
class Panels:
    """A weight [outputs, inputs] of float32 or bfloat16, or of int8 in their place."""

    address: int
    bytes_each: int
    """From one panel to the next."""
    outputs: int
    inputs: int
    owner: object
    """Keeps the memory."""
    copied: int
    """Bytes that are there for the sake of these panels alone."""

    @property
    def count(self) -> int:
        return -(-self.outputs // OUTPUTS)

    def words(self, dtype: torch.dtype) -> Tensor:
        """int32 [count, OUTPUTS, steps of the weight's `dtype`]: the same memory, whose owner is to be kept."""
        memory: Any = (ctypes.c_char * (self.count * self.bytes_each)).from_address(self.address)
        return torch.frombuffer(memory, dtype=torch.int32).as_strided(
            (self.count, OUTPUTS, self.inputs // steps_of(dtype)), (self.bytes_each // WORD_BYTES, 1, OUTPUTS)
        )


def pack(weight: Tensor) -> Panels:
    """A copy of `weight` [outputs, inputs], float32 or bfloat16 with an even number of inputs."""
    return _packed(as_numbers(weight.contiguous()), steps_of(weight.dtype))


def pack_int8(weight: Tensor, dtype: torch.dtype) -> Panels:
    """A copy of int8 `weight`, whose numbers lie as those of `dtype` would: a byte instead of each."""
    return _packed(weight.contiguous().numpy(), steps_of(dtype))


def _packed(weight: Array, step: int) -> Panels:
    outputs, inputs = weight.shape
    assert inputs % step == 0, f"{inputs} inputs are no multiple of {step}"
    whole = np.zeros((-(-outputs // OUTPUTS) * OUTPUTS, inputs), weight.dtype)
    whole[:outputs] = weight
    panels = np.ascontiguousarray(whole.reshape(-1, OUTPUTS, inputs // step, step).transpose(0, 2, 1, 3))
    return Panels(
        address=panels.ctypes.data,
        bytes_each=panels[0].nbytes if len(panels) else 0,
        outputs=outputs,
        inputs=inputs,
        owner=panels,
        copied=panels.nbytes,
    )


def in_place(packed: Tensor, weight: Tensor) -> Panels | None:
    """The memory of `packed`, oneDNN's own tensor of `weight`, or None where that does not consist of panels.

    The first, the middle and the last panel are compared with the weight.
    """
    outputs, inputs = weight.shape
    step, count = steps_of(weight.dtype), -(-outputs // OUTPUTS)
    if inputs % step:
        return None
    try:
        address, size = int(torch.ops.mkldnn.data_ptr(packed)), int(torch.ops.mkldnn._nbytes(packed))
    except (AttributeError, RuntimeError):
        return None  # a torch, or a build of it, that does not say where an opaque tensor lies
    rows, rest = divmod(size, count * ROW_BYTES)
    if rest or rows < inputs // step:
        return None
    panels = Panels(
        address=address, bytes_each=rows * ROW_BYTES, outputs=outputs, inputs=inputs, owner=packed, copied=0
    )
    sample = sorted({0, count // 2, count - 1})
    return panels if all(_holds(panels, index, weight) for index in sample) else None


def steps_of(dtype: torch.dtype) -> int:
    """Inputs that one step of a sum takes."""
    return WORD_BYTES // dtype.itemsize


def _read(panels: Panels, index: int) -> Array:
    """Words [rows, OUTPUTS] of a panel, those after the last input included."""
    memory: Any = (ctypes.c_char * panels.bytes_each).from_address(panels.address + index * panels.bytes_each)
    return np.frombuffer(memory, np.uint32).reshape(-1, OUTPUTS)


def _holds(panels: Panels, index: int, weight: Tensor) -> bool:
    """Whether a panel is what `pack` would make of its part of the weight."""
    part = pack(weight[index * OUTPUTS : (index + 1) * OUTPUTS])
    expected = _read(part, 0)
    return np.array_equal(_read(panels, index)[: len(expected)], expected)


@dataclass(frozen=True, kw_only=True, slots=True)
class PanelLinear:
    """Implements `Projection`."""

    panels: Panels
    bias: Tensor | None
    """float32"""

    def __call__(self, x: Tensor) -> Tensor:
        return multiply(x, self.panels, self.bias)


def panel_linear(packed: Tensor, weight: Tensor, bias: Tensor | None) -> PanelLinear | None:
    """The projection by the memory of `packed`, oneDNN's tensor of `weight`, if that consists of panels."""
    panels = in_place(packed, weight)
    return None if panels is None else PanelLinear(panels=panels, bias=None if bias is None else bias.float())


def multiply(x: Tensor, weight: Panels, bias: Tensor | None, *, scales: Tensor | None = None) -> Tensor:
    """x [T, inputs] Wᵀ + b, of the weight's dtype, which is that of x; b is float32.

    `scales`: float32 [outputs], what int8 weights are multiplied by; then x has the dtype that they are packed for.
    """
    x = x.contiguous()
    out = torch.empty((len(x), weight.outputs), dtype=x.dtype)
    work = np.zeros(1, PRODUCT)
    record = work[0]
    record["tokens"], record["inputs"], record["outputs"] = len(x), weight.inputs, weight.outputs
    record["x"], record["out"] = x.data_ptr(), out.data_ptr()
    record["panels"], record["panel_bytes"] = weight.address, weight.bytes_each
    record["scales"] = 0 if scales is None else scales.data_ptr()
    record["bias"] = 0 if bias is None else bias.data_ptr()
    threads = torch.get_num_threads() if weight.count * weight.bytes_each >= PARALLEL_BYTES else 1
    kernel = build_product_kernel(dtype_of(x.dtype), int8=scales is not None)
    team().run(kernel.address, work.ctypes.data, threads)
    return out
