"""What a layer does to each token alone, beside its projections: pieces of kernels.

The same arithmetic as `model.layers`, rounded to the model's dtype where those round.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from tandem_engine.attention.cpu_kernels import exp_shifted
from tandem_engine.attention.pieces import Array, inlined
from tandem_engine.model.fused.head_vectors import build_head_pieces
from tandem_engine.model.fused.numbers import narrowed, rounded

PlaceHeads = Callable[[Array, Array, Array, float, int, int, Array, Array], None]
"""One token's q, k and v: q rotated to its query, k rotated and v to their slot. Arguments:

    heads           [H + 2 KV, D] float32, of numbers of the model's dtype
    angles          [2, D] of the model's dtype, of the token's position
    head_norm       [L, H + KV, D] float32, or [0, …] when heads are not normalised; eps of that norm
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
