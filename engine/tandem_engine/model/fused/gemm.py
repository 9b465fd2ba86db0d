"""Matrix products that compiled code multiplies itself, without a call out of it.

    out = x Wᵀ        or, added:        out += x Wᵀ

W is cut into panels of `PANEL` outputs that lie together (`pack`), so a panel is read as one run of bytes. A tile of
`TILE_ROWS` rows of x by one panel is summed in registers: each value of W that is loaded serves all of its rows. The
last rows come in tiles of 4, 2 and 1.

Every output is summed over the inputs in their order, whatever tile it falls into. So a row's result is the same to
the bit alone and in any batch.

numba has no vector types, and what its loops become depends on the compiler's guesses. The tile is therefore written
as LLVM instructions, the same that an intrinsic of a C compiler would give.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.ir
import numpy as np
import torch
from numba.core import cgutils, types
from numba.extending import intrinsic

from tandem_engine.attention.cpu_kernels import Array, inlined

ir: Any = llvmlite.ir
_WIDE = torch.backends.cpu.get_cpu_capability() == "AVX512"
LANES = 16 if _WIDE else 8
"""float32 numbers of a vector register, on other machines than x86 of two."""
PANEL = 2 * LANES
"""Outputs of a panel: two registers."""
TILE_ROWS = 8 if _WIDE else 4
"""Rows of a tile: with two registers each, half of those that the CPU has, and enough sums that none waits."""
_FLOAT_BYTES, _ADDRESS_BITS = 4, 64

Tile = Callable[[int, int, int, int, int, int, bool], None]


def pack(weight: torch.Tensor) -> Array:
    """float32 W [out, in] as panels [out / PANEL, in, PANEL], a copy. `out` is a multiple of `PANEL`."""
    outputs, inputs = weight.shape
    assert outputs % PANEL == 0, f"{outputs} outputs are no multiple of {PANEL}"
    return np.ascontiguousarray(weight.float().numpy().reshape(-1, PANEL, inputs).transpose(0, 2, 1))


def _build_tile(rows: int) -> Tile:
    """The product of `rows` rows and one panel."""

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        typing_context: Any,  # noqa: ARG001
        x: Any,  # noqa: ARG001
        x_stride: Any,  # noqa: ARG001
        panel: Any,  # noqa: ARG001
        out: Any,  # noqa: ARG001
        out_stride: Any,  # noqa: ARG001
        depth: Any,  # noqa: ARG001
        added: Any,  # noqa: ARG001
    ) -> Any:
        """Addresses of x, panel and out; strides between rows in numbers; how many inputs; whether out is added to."""
        address, integer = types.uintp, types.intp
        signature = types.void(address, integer, address, address, integer, integer, types.boolean)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
            _TileCode(builder, rows).generate(*arguments)
            return context.get_dummy_value()

        return signature, generate

    return tile  # type: ignore[no-any-return]


class _TileCode:
    """Writes the instructions of one tile."""

    def __init__(self, builder: Any, rows: int) -> None:
        self.builder = builder
        self.rows = range(rows)
        self.number = ir.FloatType()
        self.vector = ir.VectorType(self.number, LANES)
        self.columns = range(0, PANEL, LANES)

    def generate(self, x: Any, x_stride: Any, panel: Any, out: Any, out_stride: Any, depth: Any, added: Any) -> None:
        builder, numbers = self.builder, self.number.as_pointer()
        x, panel, out = (builder.inttoptr(address, numbers) for address in (x, panel, out))
        # Stack slots, which the optimiser turns into registers.
        sums = [[cgutils.alloca_once(builder, self.vector) for _ in self.columns] for _ in self.rows]
        for total in (total for totals in sums for total in totals):
            builder.store(ir.Constant(self.vector, [0.0] * LANES), total)
        with cgutils.for_range(builder, depth) as loop:
            weights = [self._load(self._at(panel, loop.index, PANEL, column)) for column in self.columns]
            for row, totals in zip(self.rows, sums, strict=True):
                value = self._broadcast(builder.load(builder.gep(x, [self._offset(x_stride, row, loop.index)])))
                for weight, total in zip(weights, totals, strict=True):
                    # "contract" makes the two one instruction, where the CPU has it.
                    product = builder.fmul(value, weight, flags=("contract",))
                    builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
        for row, totals in zip(self.rows, sums, strict=True):
            for column, total in zip(self.columns, totals, strict=True):
                place = builder.gep(out, [self._offset(out_stride, row, self._int(column))])
                with builder.if_then(added):
                    builder.store(builder.fadd(self._load(place), builder.load(total)), total)
                self._store(builder.load(total), place)

    def _offset(self, stride: Any, row: int, column: Any) -> Any:
        return self.builder.add(self.builder.mul(stride, self._int(row)), column)

    def _at(self, start: Any, index: Any, stride: int, column: int) -> Any:
        offset = self.builder.mul(index, self._int(stride))
        return self.builder.gep(start, [self.builder.add(offset, self._int(column))])

    def _broadcast(self, value: Any) -> Any:
        nothing = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
        everywhere = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return self.builder.shuffle_vector(first, nothing, everywhere)

    def _load(self, place: Any) -> Any:
        loaded = self.builder.load(self.builder.bitcast(place, self.vector.as_pointer()))
        loaded.align = _FLOAT_BYTES
        return loaded

    def _store(self, value: Any, place: Any) -> None:
        self.builder.store(value, self.builder.bitcast(place, self.vector.as_pointer())).align = _FLOAT_BYTES

    def _int(self, value: int) -> Any:
        return ir.Constant(ir.IntType(_ADDRESS_BITS), value)


_full_tile, _tile_of_4, _tile_of_2, _tile_of_1 = (_build_tile(rows) for rows in (TILE_ROWS, 4, 2, 1))


@inlined
def multiply(x: Array, panels: Array, out: Array, added: bool) -> None:
    """out [T, N] = x [T, K] times the panels [N / PANEL, K, PANEL] of a weight, on top of `out` when `added`.

    All are dense float32; `out` is not `x`. For compiled code.
    """
    rows, depth, outputs = x.shape[0], x.shape[1], out.shape[1]
    for index in range(panels.shape[0]):
        panel = panels[index].ctypes.data
        begin, target = x.ctypes.data, out.ctypes.data + index * PANEL * _FLOAT_BYTES
        left = rows
        while left > 0:
            if left >= TILE_ROWS:
                _full_tile(begin, depth, panel, target, outputs, depth, added)
                done = TILE_ROWS
            elif left >= 4:
                _tile_of_4(begin, depth, panel, target, outputs, depth, added)
                done = 4
            elif left >= 2:
                _tile_of_2(begin, depth, panel, target, outputs, depth, added)
                done = 2
            else:
                _tile_of_1(begin, depth, panel, target, outputs, depth, added)
                done = 1
            left -= done
            begin += done * depth * _FLOAT_BYTES
            target += done * outputs * _FLOAT_BYTES
