"""What lies between the projections of a step of many tokens: compiled calls over rows, shared by all threads.

torch takes three to six passes over memory for each of these, most of them by one thread.
"""

from functools import cache
from typing import Any

import numba
import numpy as np
from numba.core import types as numba_types

from tandem_engine.attention import cpu_kernels, phases, pieces, vectors
from tandem_engine.attention.phases import array_at, take
from tandem_engine.attention.pieces import Array, compiled_callback, inlined
from tandem_engine.compiled import revision_of
from tandem_engine.model.fused import head_vectors, numbers, rows
from tandem_engine.model.fused.numbers import narrowed, rounded, widened
from tandem_engine.model.fused.rows import build_place_heads, norm_row, silu_and_multiply

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
"""See `rows.PlaceHeads`. qkv [T, (H + 2 KV) · D], angles [num_positions, 2, D] and pages are of the model's dtype,
positions and slots [T] int64, query [T, H, D] and head_norm [L, H + KV, D] float32, which may be 0."""

GATE = np.dtype([(name, np.int64) for name in ("next_task", "tokens", "inner", "gate_up", "out")])
"""out [T, I] = silu(gate) · up of gate_up [T, 2 I], both of the model's dtype."""

RowKernel = Any
"""A compiled callback of the address of a record; takes runs of `TASK_ROWS` tokens until none is left."""


def _revision() -> int:
    return revision_of(pieces, cpu_kernels, phases, vectors, head_vectors, numbers, rows)


@cache
def build_norm_kernel(dtype: np.dtype[Any]) -> RowKernel:
    """Of a `NORM`, for models of `dtype`."""
    revision, number = _revision(), numba.from_dtype(dtype)

    def add_and_norm(data: Any) -> None:
        work = numba.carray(data, 1)[0]
        if revision == 0:  # never: it is mentioned here to be closed over
            return
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


@cache
def build_place_kernel(dtype: np.dtype[Any], head_dim: int, group: int) -> RowKernel:
    """Of a `PLACE`, for models of `dtype`, heads of `head_dim` and `group` query heads per K/V head."""
    revision, number = _revision(), numba.from_dtype(dtype)
    place_heads = build_place_heads(dtype, head_dim)

    def place(data: Any) -> None:
        work = numba.carray(data, 1)[0]
        if revision == 0:  # never, as above
            return
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


@cache
def build_gate_kernel(dtype: np.dtype[Any]) -> RowKernel:
    """Of a `GATE`, for models of `dtype`."""
    revision, number = _revision(), numba.from_dtype(dtype)

    def gate(data: Any) -> None:
        work = numba.carray(data, 1)[0]
        if revision == 0:  # never, as above
            return
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
