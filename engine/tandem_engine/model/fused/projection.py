"""One projection of few tokens, by the panels that oneDNN multiplies many by.

At a few tokens a projection is bound by how fast its weight comes from memory, for oneDNN as well. But oneDNN's results
may depend on how many tokens there are; here a token's are the same to the bit in any batch, and in the step kernel.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from numba.core import types as numba_types
from torch import Tensor

from tandem_engine.attention import cpu_kernels, phases, pieces, vectors
from tandem_engine.attention.phases import array_at, take
from tandem_engine.attention.pieces import compiled_callback
from tandem_engine.attention.team import team
from tandem_engine.compiled import revision_of
from tandem_engine.model.fused import int8_tiles, numbers, panels, tiles
from tandem_engine.model.fused.int8_tiles import multiply_int8_panel
from tandem_engine.model.fused.numbers import dtype_of, narrowed
from tandem_engine.model.fused.panels import OUTPUTS, Panels, in_place
from tandem_engine.model.fused.tiles import multiply_panel

types: Any = numba_types

PARALLEL_BYTES = 1 << 18
"""Of a weight, from which other threads, some 5 µs away, pay."""

PRODUCT = np.dtype(
    [
        (name, np.int64)
        for name in (
            "next_panel",
            "tokens",
            "inputs",
            "outputs",
            "x",
            "panels",
            "panel_bytes",
            "scales",
            "bias",
            "out",
        )
    ]
)
"""What the kernel is given. Addresses: x [tokens, inputs] and out [tokens, outputs] of the weight's dtype, or of the
model's where that is int8; scales [outputs], for int8, and bias [outputs], float32 or 0. `next_panel` counts what has
been taken, from 0."""

ProductKernel = Any
"""A compiled callback of the address of a `PRODUCT` record; takes panels until none is left."""


@cache
def build_product_kernel(dtype: np.dtype[Any], *, int8: bool = False) -> ProductKernel:
    """The kernel for weights of float32, of bfloat16 seen as uint16, or of `int8` and an x of one of these."""
    revision = revision_of(
        pieces, cpu_kernels, phases, vectors, numbers, panels, tiles, int8_tiles,
        constant=vectors.LANES + vectors.MULTIPLIES_PAIRS + 2 * int8,
    )  # fmt: skip
    multiply = multiply_int8_panel if int8 else multiply_panel
    number = numba.from_dtype(dtype)

    def multiply_panels(data: Any) -> None:
        work = numba.carray(data, 1)[0]
        if revision == 0:  # never: it is mentioned here to be closed over
            return
        x = array_at(work.x, (work.tokens, work.inputs), number)
        out = array_at(work.out, (work.tokens, work.outputs), number)
        sums = np.empty((work.tokens, OUTPUTS), np.float32)
        panel = take(data)
        while panel * OUTPUTS < work.outputs:
            multiply(x, work.panels + panel * work.panel_bytes, sums)
            first = panel * OUTPUTS
            count = min(OUTPUTS, work.outputs - first)
            if int8:
                scales = array_at(work.scales, (work.outputs,), types.float32)
                for token in range(work.tokens):
                    for i in range(count):
                        sums[token, i] *= scales[first + i]
            if work.bias != 0:
                bias = array_at(work.bias, (work.outputs,), types.float32)
                for token in range(work.tokens):
                    for i in range(count):
                        sums[token, i] += bias[first + i]
            for token in range(work.tokens):
                for i in range(count):
                    out[token, first + i] = narrowed(sums[token, i], out)
            panel = take(data)

    return compiled_callback(multiply_panels, types.void(types.CPointer(numba.from_dtype(PRODUCT))))


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
