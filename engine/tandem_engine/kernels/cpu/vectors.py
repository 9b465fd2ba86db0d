"""Vector instructions for compiled code.

numba has no vector types, and the code of its loops depends on the compiler's heuristics. Code that has to be fast is
therefore written as LLVM instructions, the same that the intrinsics of a C compiler would give.

Numbers come in *panels*: `PANEL` adjacent numbers for each step of some sum, as many as two registers hold. One panel
is one column of work for `product`; its lanes are independent.

bfloat16 goes by *pairs*: two numbers that follow each other in the order of summing share a word of 32 bits, the first
one in its lower half. Some CPUs multiply pairs and add both products in float32 by one instruction; elsewhere each half
is widened and multiplied separately.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import llvmlite.ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from tandem_engine.kernels.cpu.pieces import inlined
from tandem_engine.kernels.cpu.target import target

ir: Any = llvmlite.ir
_llvm: Any = llvmlite.binding
_WIDE = target().wide

LANES = 16 if _WIDE else 8
"""float32 numbers of a vector register, on other machines than x86 of two."""

PANEL = 2 * LANES
"""Numbers of a panel: two registers."""

TILE_ROWS = 8 if _WIDE else 4
"""Rows of a tile: with two registers each, half of those that the CPU has, and enough sums that none waits."""

FLOAT_BYTES = 4
"""And those of a pair."""

LINE_BYTES = 64
"""That come from memory together."""

SHORT_BYTES = 2
"""Of a bfloat16."""

MULTIPLIES_PAIRS = target().pairs
_HALF_BITS, _JUST_BELOW_HALF, _UPPER_HALF = 16, 0x7FFF, 0xFFFF0000
_ADDRESS_BITS = 64
Tile = Callable[[int, int, int, int, int, int, int, int], None]
Product = Callable[[int, int, int, int, int, int, int, int, int], None]


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

    def prefetch(self, address: Any, size: int) -> None:
        """Have the lines of `size` bytes brought near while something else is computed. No address is wrong."""
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = self.builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        near = [ir.Constant(number, each) for each in (0, 3, 1)]  # to read, to all caches, data
        for offset in range(0, size, LINE_BYTES):
            place = self.builder.add(address, self.index(offset))
            self.builder.call(function, [self.builder.inttoptr(place, byte), *near])

    def spread(self, value: Any) -> Any:
        """One number in all lanes."""
        return spread(self.builder, value, LANES)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """a · b + c. "contract" makes the two one instruction, where the CPU has it."""
        return self.builder.fadd(self.builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))

    def add_products_of_pairs(self, some: Any, others: Any, before: Any) -> Any:
        """before + both products of the pairs in each lane, by the instruction for them."""
        kind = ir.FunctionType(self.vector, [self.vector, self.integers, self.integers])
        # By its name: the type that LLVM requires for bfloat16 changed from release to release.
        multiply = ir.InlineAsm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", side_effect=False)
        return self.builder.call(multiply, [before, some, others])

    def add_pairs(self, pair: Any, pairs: Any, before: Any) -> Any:
        """before + both products of one pair, a word, and each of the `pairs`, words of a vector."""
        if MULTIPLIES_PAIRS:
            return self.add_products_of_pairs(self.spread(pair), pairs, before)
        for half in (self._second, self._first):
            number = self.spread(self.builder.bitcast(half(pair), self.number))
            before = self.multiply_add(number, self.builder.bitcast(half(pairs), self.vector), before)
        return before

    def _first(self, words: Any) -> Any:
        """float32 bits of the first number of each pair."""
        return self.builder.shl(words, self._like(words, _HALF_BITS))

    def _second(self, words: Any) -> Any:
        return self.builder.and_(words, self._like(words, _UPPER_HALF))

    @staticmethod
    def _like(words: Any, value: int) -> Any:
        """The same in all lanes of what is a vector, or one word."""
        kind = words.type
        return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def spread(builder: Any, value: Any, lanes: int) -> Any:
    """One number in all lanes of a vector of any length."""
    nothing = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes))


def load_unaligned(builder: Any, place: Any, kind: Any) -> Any:
    """A vector of any kind, from an address that is a multiple of `SHORT_BYTES` alone."""
    loaded = builder.load(builder.bitcast(place, kind.as_pointer()))
    loaded.align = SHORT_BYTES
    return loaded


def upper_half(builder: Any, value: Any) -> Any:
    """The nearest bfloat16, ties to even, of each number of a float32 vector of any length, as int32 words whose lower
    halves are 0. Of finite numbers, and of NaNs as CPUs make them."""
    words = ir.VectorType(ir.IntType(32), value.type.count)
    half, one, below, upper = (
        ir.Constant(words, [each] * words.count) for each in (_HALF_BITS, 1, _JUST_BELOW_HALF, _UPPER_HALF)
    )
    bits = builder.bitcast(value, words)
    odd = builder.and_(builder.lshr(bits, half), one)
    return builder.and_(builder.add(builder.add(bits, below), odd), upper)


if MULTIPLIES_PAIRS:
    _llvm.initialize_native_asmparser()


def _build_tile(rows: int, *, pairs: bool) -> Tile:
    """The product of `rows` rows and one panel, of float32 or of pairs of bfloat16."""

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
            _write_tile(Vectors(builder), rows, *arguments, pairs=pairs)
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
    *,
    pairs: bool,
) -> None:
    builder, columns = code.builder, [code.index(column) for column in range(0, PANEL, LANES)]
    scaled = builder.icmp_unsigned("!=", factor, ir.Constant(factor.type, 0))
    x, panel = (code.ints(address) if pairs else code.floats(address) for address in (x, panel))
    out, factor = code.floats(out), code.floats(factor)
    # Stack slots, which the optimizer turns into registers.
    sums = [[cgutils.alloca_once(builder, code.vector) for _ in columns] for _ in range(rows)]
    for total in (total for totals in sums for total in totals):
        builder.store(code.constant(0.0), total)
    with cgutils.for_range(builder, depth) as loop:
        weights = [code.load(code.place(panel, loop.index, code.index(PANEL), column)) for column in columns]
        step = builder.mul(loop.index, x_step)
        for row, totals in enumerate(sums):
            value = builder.load(code.place(x, x_row, code.index(row), step))
            for weight, total in zip(weights, totals, strict=True):
                before = builder.load(total)
                after = (
                    code.add_pairs(value, weight, before)
                    if pairs
                    else code.multiply_add(code.spread(value), weight, before)
                )
                builder.store(after, total)
    for row, totals in enumerate(sums):
        for column, total in zip(columns, totals, strict=True):
            place = code.place(out, out_row, code.index(row), column)
            with builder.if_then(scaled):
                before = code.multiply_add(
                    code.load(place), code.load(builder.gep(factor, [column])), builder.load(total)
                )
                builder.store(before, total)
            code.store(builder.load(total), place)


def _build_product(*, pairs: bool) -> Product:
    full_tile, tile_of_4, tile_of_2, tile_of_1 = (_build_tile(rows, pairs=pairs) for rows in (TILE_ROWS, 4, 2, 1))

    def product(
        x: int, x_row: int, x_step: int, panel: int, out: int, out_row: int, rows: int, depth: int, factor: int
    ) -> None:
        left = rows
        while left > 0:
            if left >= TILE_ROWS:
                full_tile(x, x_row, x_step, panel, out, out_row, depth, factor)
                done = TILE_ROWS
            elif left >= 4:
                tile_of_4(x, x_row, x_step, panel, out, out_row, depth, factor)
                done = 4
            elif left >= 2:
                tile_of_2(x, x_row, x_step, panel, out, out_row, depth, factor)
                done = 2
            else:
                tile_of_1(x, x_row, x_step, panel, out, out_row, depth, factor)
                done = 1
            left -= done
            x += done * x_row * FLOAT_BYTES
            out += done * out_row * FLOAT_BYTES

    return inlined(product)  # type: ignore[no-any-return]


product = _build_product(pairs=False)
"""out[row, lane] = Σ over steps of x[row, step] · panel[step, lane], plus out[row, lane] · factor[lane].

Every output is summed over the steps in their order, whatever tile its row falls into. So it is the same to the bit
alone and among any rows. Arguments, for compiled code:

    x, panel, out, factor       addresses of float32 numbers. `panel` is [depth, PANEL], `factor` [PANEL], both dense; a
                                `factor` of 0 is none
    x_row, x_step, out_row      numbers from one row, or step, to the next
    rows, depth                 of x, and how many steps
"""

product_of_pairs = _build_product(pairs=True)
"""The same, where x and panel hold pairs of bfloat16, words that count as numbers: a step is two numbers of a sum."""


@intrinsic  # type: ignore[untyped-decorator]
def copy_bytes(typing_context: Any, source: Any, target: Any, count: Any) -> Any:  # noqa: ARG001
    """`count` bytes from one address to another."""
    signature = types.void(types.uintp, types.uintp, types.intp)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        byte = ir.IntType(8).as_pointer()
        source, target, count = arguments
        cgutils.raw_memcpy(builder, builder.inttoptr(target, byte), builder.inttoptr(source, byte), count, 1)
        return context.get_dummy_value()

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def pair_rows(typing_context: Any, first: Any, second: Any, words: Any, count: Any) -> Any:  # noqa: ARG001
    """words[i] = the pair of first[i] and second[i], `count` numbers of 16 bits each; addresses."""
    signature = types.void(types.uintp, types.uintp, types.uintp, types.intp)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        code, half = Vectors(builder), ir.IntType(16)
        first, second, words, count = arguments
        halves = [builder.inttoptr(address, half.as_pointer()) for address in (first, second)]
        words, lanes = code.ints(words), code.index(LANES)
        whole = builder.udiv(count, lanes)
        kind = ir.VectorType(half, LANES)
        with cgutils.for_range(builder, whole) as loop:
            start = builder.mul(loop.index, lanes)
            low, high = (
                builder.zext(load_unaligned(builder, builder.gep(each, [start]), kind), code.integers)
                for each in halves
            )
            shift = ir.Constant(code.integers, [_HALF_BITS] * LANES)
            code.store(builder.or_(low, builder.shl(high, shift)), builder.gep(words, [start]))
        done = builder.mul(whole, lanes)
        with cgutils.for_range(builder, builder.sub(count, done)) as loop:
            place = builder.add(done, loop.index)
            low, high = (builder.zext(builder.load(builder.gep(each, [place])), ir.IntType(32)) for each in halves)
            pair = builder.or_(low, builder.shl(high, ir.Constant(ir.IntType(32), _HALF_BITS)))
            builder.store(pair, builder.gep(words, [place]))
        return context.get_dummy_value()

    return signature, generate
