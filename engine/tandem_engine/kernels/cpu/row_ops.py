"""What is between the projections of a step of many tokens: compiled calls over rows, shared by all threads.

torch takes three to six passes over memory for each of these, most of them on one thread.

    per token   norm of a row, adding to the residual stream, silu(gate) · up
    q, k        (norm) ─▶ rotation ─▶ float32, or a number of the model's dtype
    v                              ─▶ a number of the model's dtype

The heads are written as vector instructions, because numba's loops over so few numbers stay scalar. Halves of a head
are one vector each, which LLVM cuts into registers. The arithmetic is that of `model.layers`, rounded to the model's
dtype at the same places.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import llvmlite.ir
import numba
import numpy as np
from numba.core import cgutils
from numba.core import types as numba_types
from numba.extending import intrinsic

from tandem_engine.kernels.cpu.attention_work import exp_shifted
from tandem_engine.kernels.cpu.kept import kept
from tandem_engine.kernels.cpu.numbers import narrowed, rounded, widened
from tandem_engine.kernels.cpu.pieces import Array, compiled_callback, inlined
from tandem_engine.kernels.cpu.threads import array_at, take
from tandem_engine.kernels.cpu.vectors import FLOAT_BYTES, SHORT_BYTES, load_unaligned, spread, upper_half

ir: Any = llvmlite.ir
_ADDRESS, _FLOAT = numba_types.uintp, numba_types.float32
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

        return numba_types.void(_ADDRESS, _ADDRESS), generate

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

        return numba_types.void(_ADDRESS, _ADDRESS, _ADDRESS), generate

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

        return numba_types.void(_ADDRESS, _ADDRESS, _ADDRESS, _FLOAT, _ADDRESS), generate

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

    Unlike `kernels.cpu.vectors.Vectors`, whose vectors are registers and whose numbers have the alignment of their
    type: these are halves of a head, dense from addresses that are even and no more.
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


PlaceHeads = Callable[[Array, Array, Array, float, int, int, Array, Array], None]
"""One token's q, k and v: q rotated to its query, k rotated and v to their slot. Arguments:

    heads           [H + 2 KV, D] float32, of numbers of the model's dtype
    angles          [2, D] of the model's dtype, of the token's position
    head_norm       [L, H + KV, D] float32, or [0, …] when heads are not normalized; eps of that norm
    layer, place    slot of the pages
    query           [H, D] float32
    pages           [page, L, 2, KV, slot, D] of the model's dtype
"""


@inlined
def norm_rows(rows: Array, weight: Array, eps: float, out: Array) -> None:
    """out [T, E] = rows / sqrt(mean(rows²) + eps) · weight."""
    for row in range(rows.shape[0]):
        norm_row(rows[row], weight, eps, out[row], out, rows.shape[1])


@inlined
def norm_row(x: Array, weight: Array, eps: float, out: Array, like: Array, size: int) -> None:
    """The same for one row of `size` numbers, which are those of `like`; `out` may be `x`."""
    total = np.float32(0.0)
    for i in range(size):
        total += x[i] * x[i]
    factor = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
    for i in range(size):
        out[i] = narrowed(rounded(rounded(x[i] * factor, like) * weight[i], like), out)


@cache
def build_place_heads(dtype: np.dtype[Any], head_dim: int) -> PlaceHeads:
    """For models of `dtype` and heads of `head_dim`."""
    pieces = build_head_pieces(dtype, head_dim)
    turn, turn_narrow, narrow = pieces.turn, pieces.turn_narrow, pieces.narrow
    norm_and_turn, norm_and_turn_narrow = pieces.norm_and_turn, pieces.norm_and_turn_narrow

    def place_heads(
        heads: Array, angles: Array, head_norm: Array, eps: float, layer: int, place: int, query: Array, pages: Array
    ) -> None:
        page, slot = divmod(place, pages.shape[4])
        num_query, num_kv = query.shape[0], pages.shape[3]
        turns = angles.ctypes.data
        normed = head_norm.shape[0] > 0
        for head in range(num_query):
            source, target = heads[head].ctypes.data, query[head].ctypes.data
            if normed:
                norm_and_turn(source, turns, head_norm[layer, head].ctypes.data, eps, target)
            else:
                turn(source, turns, target)
        for head in range(num_kv):
            source, target = heads[num_query + head].ctypes.data, pages[page, layer, 0, head, slot].ctypes.data
            if normed:
                norm_and_turn_narrow(source, turns, head_norm[layer, num_query + head].ctypes.data, eps, target)
            else:
                turn_narrow(source, turns, target)
            value = heads[num_query + num_kv + head].ctypes.data
            narrow(value, pages[page, layer, 1, head, slot].ctypes.data)

    return inlined(place_heads)  # type: ignore[no-any-return]


@inlined
def silu_and_multiply(gate_up: Array, out: Array, decay: Array, exponents: Array) -> None:
    """out [I] = gate / (1 + e^(−gate)) · up. By e^(−|gate|), which no gate lets overflow."""
    size = out.shape[0]
    for i in range(size):
        decay[i] = -np.abs(gate_up[i])
    exp_shifted(decay, exponents, size, np.float32(0.0))
    for i in range(size):
        gate = gate_up[i]
        share = decay[i] if gate < np.float32(0.0) else np.float32(1.0)
        activated = rounded(gate * share / (np.float32(1.0) + decay[i]), out)
        out[i] = narrowed(activated * gate_up[size + i], out)


types: Any = numba_types

TASK_ROWS = 8
"""Tokens of a task."""

NORM = np.dtype(
    [(name, np.int64) for name in ("next_task", "tokens", "size", "delta", "hidden", "weight", "out")]
    + [("eps", np.float32)]
)
"""hidden [T, E] += delta [T, E], if its address is not 0, and out [T, E] = norm(hidden). All are of the model's dtype
but the weight [E], float32."""

PLACE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "next_task",
            "tokens",
            "layer",
            "qkv",
            "positions",
            "slots",
            "angles",
            "num_positions",
            "head_norm",
            "pages",
            "num_layers",
            "num_kv_heads",
            "page_size",
            "query",
        )
    ]
    + [("eps", np.float32)]
)
"""See `PlaceHeads`. qkv [T, (H + 2 KV) · D], angles [num_positions, 2, D] and pages are of the model's dtype,
positions and slots [T] int64, query [T, H, D] and head_norm [L, H + KV, D] float32, which may be 0."""

GATE = np.dtype([(name, np.int64) for name in ("next_task", "tokens", "inner", "gate_up", "out")])
"""out [T, I] = silu(gate) · up of gate_up [T, 2 I], both of the model's dtype."""

RowKernel = Any
"""A compiled callback of the address of a record; takes runs of `TASK_ROWS` tokens until none is left."""


@kept
def build_norm_kernel(dtype: np.dtype[Any]) -> RowKernel:
    """Of a `NORM`, for models of `dtype`."""
    number = numba.from_dtype(dtype)

    def add_and_norm(data: Any) -> None:
        work = numba.carray(data, 1)[0]
        hidden = array_at(work.hidden, (work.tokens, work.size), number)
        out = array_at(work.out, (work.tokens, work.size), number)
        weight = array_at(work.weight, (work.size,), types.float32)
        has_delta = work.delta != 0
        delta = array_at(work.delta, (work.tokens if has_delta else 0, work.size), number)
        row = np.empty(work.size, np.float32)
        begin = take(data) * TASK_ROWS
        while begin < work.tokens:
            for token in range(begin, min(begin + TASK_ROWS, work.tokens)):
                _widen_row(hidden[token], row)
                if has_delta:
                    _add_row(delta[token], row, hidden[token])
                norm_row(row, weight, work.eps, out[token], out, work.size)
            begin = take(data) * TASK_ROWS

    return compiled_callback(add_and_norm, _signature(NORM))


@kept
def build_place_kernel(dtype: np.dtype[Any], head_dim: int, group: int) -> RowKernel:
    """Of a `PLACE`, for models of `dtype`, heads of `head_dim` and `group` query heads per K/V head."""
    number = numba.from_dtype(dtype)
    place_heads = build_place_heads(dtype, head_dim)

    def place(data: Any) -> None:
        work = numba.carray(data, 1)[0]
        heads = work.num_kv_heads * group
        all_heads = heads + 2 * work.num_kv_heads
        qkv = array_at(work.qkv, (work.tokens, all_heads * head_dim), number)
        positions = array_at(work.positions, (work.tokens,), types.int64)
        slots = array_at(work.slots, (work.tokens,), types.int64)
        angles = array_at(work.angles, (work.num_positions, 2, head_dim), number)
        normed = work.num_layers if work.head_norm != 0 else 0
        head_norm = array_at(work.head_norm, (normed, heads + work.num_kv_heads, head_dim), types.float32)
        pages = array_at(work.pages, (1, work.num_layers, 2, work.num_kv_heads, work.page_size, head_dim), number)
        query = array_at(work.query, (work.tokens, heads, head_dim), types.float32)
        row = np.empty(all_heads * head_dim, np.float32)
        begin = take(data) * TASK_ROWS
        while begin < work.tokens:
            for token in range(begin, min(begin + TASK_ROWS, work.tokens)):
                _widen_row(qkv[token], row)
                place_heads(
                    row.reshape(all_heads, head_dim),
                    angles[positions[token]],
                    head_norm,
                    work.eps,
                    work.layer,
                    slots[token],
                    query[token],
                    pages,
                )
            begin = take(data) * TASK_ROWS

    return compiled_callback(place, _signature(PLACE))


@kept
def build_gate_kernel(dtype: np.dtype[Any]) -> RowKernel:
    """Of a `GATE`, for models of `dtype`."""
    number = numba.from_dtype(dtype)

    def gate(data: Any) -> None:
        work = numba.carray(data, 1)[0]
        gate_up = array_at(work.gate_up, (work.tokens, 2 * work.inner), number)
        out = array_at(work.out, (work.tokens, work.inner), number)
        row = np.empty(2 * work.inner, np.float32)
        decay, exponents = np.empty(work.inner, np.float32), np.empty(work.inner, np.int32)
        begin = take(data) * TASK_ROWS
        while begin < work.tokens:
            for token in range(begin, min(begin + TASK_ROWS, work.tokens)):
                _widen_row(gate_up[token], row)
                silu_and_multiply(row, out[token], decay, exponents)
            begin = take(data) * TASK_ROWS

    return compiled_callback(gate, _signature(GATE))


def _signature(record: np.dtype[Any]) -> Any:
    return types.void(types.CPointer(numba.from_dtype(record)))


@inlined
def _widen_row(source: Array, row: Array) -> None:
    for i in range(row.shape[0]):
        row[i] = widened(source[i])


@inlined
def _add_row(delta: Array, row: Array, target: Array) -> None:
    """row += delta, as a number of `target`, which becomes it."""
    for i in range(row.shape[0]):
        row[i] = rounded(row[i] + widened(delta[i]), target)
        target[i] = narrowed(row[i], target)
