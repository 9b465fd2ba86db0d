"""What a head of q, k or v goes through between its projection and attention, as vector instructions.

    q, k    (norm) ─▶ rotation ─▶ float32, or a number of the model's dtype
    v                          ─▶ a number of the model's dtype

numba's loops over these few numbers stay scalar, or nearly so. Halves of a head are one vector each, which LLVM cuts
into registers. The same arithmetic as `model.layers`, rounded to the model's dtype where those round.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import llvmlite.ir
import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

from tandem_engine.attention.vectors import FLOAT_BYTES, SHORT_BYTES, load_unaligned, spread, upper_half

ir: Any = llvmlite.ir

_ADDRESS, _FLOAT = types.uintp, types.float32
_HALF_BITS = 16


class HeadPieces(NamedTuple):
    """Functions for compiled code. Arguments are addresses, and eps; x [D] is float32, angles [2, D] and results of
    `narrow` are of the model's dtype, the weight [D] of a norm and results else float32."""

    turn: Callable[[int, int, int], None]
    """x, angles, out"""
    turn_narrow: Callable[[int, int, int], None]
    norm_and_turn: Callable[[int, int, int, float, int], None]
    """x, angles, weight, eps, out"""
    norm_and_turn_narrow: Callable[[int, int, int, float, int], None]
    narrow: Callable[[int, int], None]
    """x, out"""


@cache
def build_head_pieces(dtype: np.dtype[Any], head_dim: int) -> HeadPieces:
    """For heads of `head_dim` numbers of float32, or of bfloat16 seen as uint16."""
    halves = dtype == np.uint16

    @intrinsic  # type: ignore[untyped-decorator]
    def narrow(typing_context: Any, x: Any, out: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
            code = _Code(builder, head_dim, halves=halves)
            code.store(code.load(arguments[0]), arguments[1], narrow=True)
            return context.get_dummy_value()

        return types.void(_ADDRESS, _ADDRESS), generate

    return HeadPieces(
        turn=_build_turn(head_dim, halves=halves, narrow=False),
        turn_narrow=_build_turn(head_dim, halves=halves, narrow=True),
        norm_and_turn=_build_norm_and_turn(head_dim, halves=halves, narrow=False),
        norm_and_turn_narrow=_build_norm_and_turn(head_dim, halves=halves, narrow=True),
        narrow=narrow,
    )


def _build_turn(head_dim: int, *, halves: bool, narrow: bool) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def turn(typing_context: Any, x: Any, angles: Any, out: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
            x, angles, out = arguments
            code = _Code(builder, head_dim // 2, halves=halves)
            _write_turn(code, *code.pair(x), angles, out, narrow=narrow)
            return context.get_dummy_value()

        return types.void(_ADDRESS, _ADDRESS, _ADDRESS), generate

    return turn


def _build_norm_and_turn(head_dim: int, *, halves: bool, narrow: bool) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def norm_and_turn(typing_context: Any, x: Any, angles: Any, weight: Any, eps: Any, out: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
            x, angles, weight, eps, out = arguments
            code = _Code(builder, head_dim // 2, halves=halves)
            low, high = code.pair(x)
            squares = builder.fadd(builder.fmul(low, low), builder.fmul(high, high))
            mean = builder.fdiv(code.total(squares), ir.Constant(ir.FloatType(), float(head_dim)))
            root = code.intrinsic("sqrt", ir.FloatType(), builder.fadd(mean, eps))
            factor = code.spread(builder.fdiv(ir.Constant(ir.FloatType(), 1.0), root))
            low, high = (
                code.rounded(builder.fmul(code.rounded(builder.fmul(part, factor)), scale))
                for part, scale in zip((low, high), code.pair(weight), strict=True)
            )
            _write_turn(code, low, high, angles, out, narrow=narrow)
            return context.get_dummy_value()

        return types.void(_ADDRESS, _ADDRESS, _ADDRESS, _FLOAT, _ADDRESS), generate

    return norm_and_turn


def _write_turn(code: "_Code", low: Any, high: Any, angles: Any, out: Any, *, narrow: bool) -> None:
    """out = x · cos + (x, its halves swapped) · signed sin, of angles [2, D]."""
    builder, product = code.builder, code.builder.fmul
    cosines, sines = ([code.load_number(angles, row * 2 + half) for half in (0, 1)] for row in (0, 1))
    for half, (own, other) in enumerate(((low, high), (high, low))):
        kept = code.rounded(product(own, cosines[half]))
        turned = code.rounded(product(other, sines[half]))
        code.store(code.rounded(builder.fadd(kept, turned)), out, part=half, narrow=narrow)


class _Code:
    """Instructions on vectors of `size` float32 numbers of a model whose own are 16 bits, if `halves`.

    Unlike `attention.vectors.Vectors`, whose vectors are registers and whose numbers have the alignment of their type:
    these are halves of a head, dense from addresses that are even and no more.
    """

    def __init__(self, builder: Any, size: int, *, halves: bool) -> None:
        self.builder = builder
        self.size, self.halves = size, halves
        self.vector = ir.VectorType(ir.FloatType(), size)
        self.words = ir.VectorType(ir.IntType(32), size)
        self.shorts = ir.VectorType(ir.IntType(16), size)

    def pair(self, address: Any) -> tuple[Any, Any]:
        """Both halves of a head of float32 numbers."""
        return self.load(address), self.load(address, part=1)

    def load(self, address: Any, *, part: int = 0) -> Any:
        """float32 numbers, those of the vector number `part` from an address on."""
        return self._load(self.vector, address, part)

    def load_number(self, address: Any, part: int) -> Any:
        """The same of numbers of the model's dtype."""
        if not self.halves:
            return self._load(self.vector, address, part)
        wide = self.builder.zext(self._load(self.shorts, address, part), self.words)
        return self.builder.bitcast(self.builder.shl(wide, self._all(_HALF_BITS)), self.vector)

    def store(self, value: Any, address: Any, *, part: int = 0, narrow: bool = False) -> None:
        """float32 numbers as they are, or as those of the model's dtype."""
        if narrow and self.halves:
            upper = self.builder.lshr(upper_half(self.builder, value), self._all(_HALF_BITS))
            value = self.builder.trunc(upper, self.shorts)
        self.builder.store(value, self._place(value.type, address, part)).align = SHORT_BYTES

    def rounded(self, value: Any) -> Any:
        """As the numbers are after a stay in the model's dtype."""
        return self.builder.bitcast(upper_half(self.builder, value), self.vector) if self.halves else value

    def total(self, value: Any) -> Any:
        """Of all numbers, in any order."""
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), self.vector])
        name = f"llvm.vector.reduce.fadd.v{self.size}f32"
        add = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(add, [ir.Constant(ir.FloatType(), 0.0), value], fastmath=("reassoc",))

    def spread(self, value: Any) -> Any:
        return spread(self.builder, value, self.size)

    def intrinsic(self, name: str, kind: Any, value: Any) -> Any:
        function = ir.FunctionType(kind, [kind])
        return self.builder.call(
            cgutils.get_or_insert_function(self.builder.module, function, f"llvm.{name}.f32"), [value]
        )

    def _load(self, kind: Any, address: Any, part: int) -> Any:
        return load_unaligned(self.builder, self._place(kind, address, part), kind)

    def _place(self, kind: Any, address: Any, part: int) -> Any:
        """Of vector number `part` of a kind, dense from an address on."""
        bytes_each = self.size * (SHORT_BYTES if kind == self.shorts else FLOAT_BYTES)
        start = self.builder.add(address, ir.Constant(address.type, part * bytes_each))
        return self.builder.inttoptr(start, kind.as_pointer())

    def _all(self, value: int) -> Any:
        return ir.Constant(self.words, [value] * self.size)
