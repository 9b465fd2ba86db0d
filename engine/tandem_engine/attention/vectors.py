"""Vector instructions for compiled code.

numba has no vector types, and what its loops become depends on the compiler's guesses. What has to be fast is therefore
written as LLVM instructions, the same that the intrinsics of a C compiler would give.

Numbers come in *panels*: `PANEL` of them side by side for each step of some sum, as many as two registers hold. One
panel is one column of work for `product`; its lanes never meet.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.ir
import torch
from numba.core import cgutils, types
from numba.extending import intrinsic

from tandem_engine.attention.cpu_kernels import inlined

ir: Any = llvmlite.ir
_WIDE = torch.backends.cpu.get_cpu_capability() == "AVX512"
LANES = 16 if _WIDE else 8
"""float32 numbers of a vector register, on other machines than x86 of two."""
PANEL = 2 * LANES
"""Numbers of a panel: two registers."""
TILE_ROWS = 8 if _WIDE else 4
"""Rows of a tile: with two registers each, half of those that the CPU has, and enough sums that none waits."""
FLOAT_BYTES = 4
_ADDRESS_BITS = 64

Tile = Callable[[int, int, int, int, int, int, int, int], None]


class Vectors:
    """Writes instructions on vectors of `LANES` float32 or int32 numbers."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.number = ir.FloatType()
        self.vector = ir.VectorType(self.number, LANES)
        self.integers = ir.VectorType(ir.IntType(32), LANES)

    def floats(self, address: Any) -> Any:
        return self.builder.inttoptr(address, self.number.as_pointer())

    def ints(self, address: Any) -> Any:
        return self.builder.inttoptr(address, ir.IntType(32).as_pointer())

    def index(self, value: int) -> Any:
        return ir.Constant(ir.IntType(_ADDRESS_BITS), value)

    def constant(self, value: float) -> Any:
        return ir.Constant(self.vector, [value] * LANES)

    def place(self, start: Any, index: Any, stride: Any, column: Any) -> Any:
        """The address of start[index · stride + column]."""
        return self.builder.gep(start, [self.builder.add(self.builder.mul(index, stride), column)])

    def load(self, place: Any) -> Any:
        kind = self.vector if place.type.pointee == self.number else self.integers
        loaded = self.builder.load(self.builder.bitcast(place, kind.as_pointer()))
        loaded.align = FLOAT_BYTES
        return loaded

    def store(self, value: Any, place: Any) -> None:
        self.builder.store(value, self.builder.bitcast(place, value.type.as_pointer())).align = FLOAT_BYTES

    def spread(self, value: Any) -> Any:
        """One number in all lanes."""
        vector = ir.VectorType(value.type, LANES)
        nothing = ir.Constant(vector, ir.Undefined)
        first = self.builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
        return self.builder.shuffle_vector(first, nothing, ir.Constant(self.integers, [0] * LANES))

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """a · b + c. "contract" makes the two one instruction, where the CPU has it."""
        return self.builder.fadd(self.builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def _build_tile(rows: int) -> Tile:
    """The product of `rows` rows and one panel."""

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        typing_context: Any,  # noqa: ARG001
        x: Any,  # noqa: ARG001
        x_row: Any,  # noqa: ARG001
        x_step: Any,  # noqa: ARG001
        panel: Any,  # noqa: ARG001
        out: Any,  # noqa: ARG001
        out_row: Any,  # noqa: ARG001
        depth: Any,  # noqa: ARG001
        factor: Any,  # noqa: ARG001
    ) -> Any:
        """As `product`."""
        address, integer = types.uintp, types.intp
        signature = types.void(address, integer, integer, address, address, integer, integer, address)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
            _write_tile(Vectors(builder), rows, *arguments)
            return context.get_dummy_value()

        return signature, generate

    return tile  # type: ignore[no-any-return]


def _write_tile(
    code: Vectors,
    rows: int,
    x: Any,
    x_row: Any,
    x_step: Any,
    panel: Any,
    out: Any,
    out_row: Any,
    depth: Any,
    factor: Any,
) -> None:
    builder, columns = code.builder, [code.index(column) for column in range(0, PANEL, LANES)]
    scaled = builder.icmp_unsigned("!=", factor, ir.Constant(factor.type, 0))
    x, panel, out, factor = (code.floats(address) for address in (x, panel, out, factor))
    # Stack slots, which the optimiser turns into registers.
    sums = [[cgutils.alloca_once(builder, code.vector) for _ in columns] for _ in range(rows)]
    for total in (total for totals in sums for total in totals):
        builder.store(code.constant(0.0), total)
    with cgutils.for_range(builder, depth) as loop:
        weights = [code.load(code.place(panel, loop.index, code.index(PANEL), column)) for column in columns]
        step = builder.mul(loop.index, x_step)
        for row, totals in enumerate(sums):
            value = code.spread(builder.load(code.place(x, x_row, code.index(row), step)))
            for weight, total in zip(weights, totals, strict=True):
                builder.store(code.multiply_add(value, weight, builder.load(total)), total)
    for row, totals in enumerate(sums):
        for column, total in zip(columns, totals, strict=True):
            place = code.place(out, out_row, code.index(row), column)
            with builder.if_then(scaled):
                before = code.multiply_add(
                    code.load(place), code.load(builder.gep(factor, [column])), builder.load(total)
                )
                builder.store(before, total)
            code.store(builder.load(total), place)


_full_tile, _tile_of_4, _tile_of_2, _tile_of_1 = (_build_tile(rows) for rows in (TILE_ROWS, 4, 2, 1))


@inlined
def product(
    x: int, x_row: int, x_step: int, panel: int, out: int, out_row: int, rows: int, depth: int, factor: int
) -> None:
    """out[row, lane] = Σ over steps of x[row, step] · panel[step, lane], plus out[row, lane] · factor[lane].

    Every output is summed over the steps in their order, whatever tile its row falls into. So it is the same to the
    bit alone and among any rows.

    Args:
        x, panel, out, factor: addresses of float32 numbers. `panel` is [depth, PANEL] and `factor` [PANEL], both dense;
            a `factor` of 0 is none.
        x_row, x_step, out_row: numbers from one row, or step, to the next.
    """
    left = rows
    while left > 0:
        if left >= TILE_ROWS:
            _full_tile(x, x_row, x_step, panel, out, out_row, depth, factor)
            done = TILE_ROWS
        elif left >= 4:
            _tile_of_4(x, x_row, x_step, panel, out, out_row, depth, factor)
            done = 4
        elif left >= 2:
            _tile_of_2(x, x_row, x_step, panel, out, out_row, depth, factor)
            done = 2
        else:
            _tile_of_1(x, x_row, x_step, panel, out, out_row, depth, factor)
            done = 1
        left -= done
        x += done * x_row * FLOAT_BYTES
        out += done * out_row * FLOAT_BYTES
