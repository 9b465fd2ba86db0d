"""Rotary embedding of q and k, and the way of k and v to their pages, in one pass over a step's tokens.

    q, k   (are normalized head by head: x / sqrt(mean(x²) + eps) · w, see `rms_norm`)
           x[:R/2]     is  x[:R/2] · cos − x[R/2:R] · sin
           x[R/2:R]    is  x[R/2:R] · cos + x[:R/2] · sin                  the rest of a head stays as it is
    q      ─▶ a dense tensor
    k, v   ─▶ pages, see `store_kv`

A rotation pairs dimension i with i + R/2 ("neox"), for R ≤ D of them; cos and signed sin are those of
`model.layers.attention`, one row of each for a token, both halves written out.

Shapes: q [T, H, D], k and v [T, KV, D], heads dense and tokens as far apart as the projection left them; pages and
slots as in `store_kv`.

Every product and sum is rounded to the dtype of q, as torch's operations are, and none is contracted to a fused
multiply-add; so without the norm q and k are equal to those of `Rotation.apply` to the bit, in float32 and bfloat16.

Tiling: program (t, i) has TILE heads of token t (see `store_kv`): those of q first, then k's, then v's. What torch does
in 12 passes over q, k and v (6 of rotation, 4 of the norm, 2 of the store) reads and writes each number once.

Source: Su et al., RoFormer, 2021; the fused write as in FlashInfer's and SGLang's set_kv_buffer.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_engine.kernels.interface import HeadTurn, KvScales
from tandem_engine.kernels.triton.common import rounded
from tandem_engine.kernels.triton.norm_activation import normalized
from tandem_engine.kernels.triton.store_kv import (
    copy_heads,
    page_stride_of,
    require_heads,
    store_constants,
    stored,
    warps_of,
)


@triton.jit
def _rotate_heads(
    source,
    target,
    scales,
    weight,
    cos,
    sin,
    head,
    live,
    eps,
    TARGET_STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    SCALED: tl.constexpr,
):
    """As `copy_heads`, normalized and rotated on the way. `weight` points at the first head's."""
    dtype = source.dtype.element_ty
    half: tl.constexpr = ROTARY // 2
    column = tl.arange(0, HALF_WIDTH)[None, :]
    rest = ROTARY + tl.arange(0, REST_WIDTH)[None, :]
    in_half, in_rest = live & (column < half), live & (rest < SIZE)
    low = tl.load(source + head * SIZE + column, mask=in_half, other=0.0).to(tl.float32)
    high = tl.load(source + head * SIZE + half + column, mask=in_half, other=0.0).to(tl.float32)
    tail = tl.load(source + head * SIZE + rest, mask=in_rest, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(low * low + high * high, axis=1) + tl.sum(tail * tail, axis=1)
        squares = squares[:, None]
        low_weight = tl.load(weight + head * SIZE + column, mask=in_half, other=0.0).to(tl.float32)
        high_weight = tl.load(weight + head * SIZE + half + column, mask=in_half, other=0.0).to(tl.float32)
        tail_weight = tl.load(weight + head * SIZE + rest, mask=in_rest, other=0.0).to(tl.float32)
        low = rounded(normalized(low, squares, low_weight, eps, SIZE, dtype, ROUND_FIRST), dtype)
        high = rounded(normalized(high, squares, high_weight, eps, SIZE, dtype, ROUND_FIRST), dtype)
        tail = normalized(tail, squares, tail_weight, eps, SIZE, dtype, ROUND_FIRST)
    cos_low = tl.load(cos + column, mask=column < half, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + half + column, mask=column < half, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + column, mask=column < half, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + half + column, mask=column < half, other=0.0).to(tl.float32)
    turned_low = rounded(rounded(low * cos_low, dtype) + rounded(high * sin_low, dtype), dtype)
    turned_high = rounded(rounded(high * cos_high, dtype) + rounded(low * sin_high, dtype), dtype)
    scale = 1.0
    if SCALED:
        scale = tl.load(scales + head, mask=live, other=1.0)
    kind: tl.constexpr = target.dtype.element_ty
    place = target + head * TARGET_STRIDE
    tl.store(place + column, stored(turned_low, scale, SCALED, kind), mask=in_half)
    tl.store(place + half + column, stored(turned_high, scale, SCALED, kind), mask=in_half)
    if ROTARY < SIZE:
        tl.store(place + rest, stored(rounded(tail, dtype), scale, SCALED, kind), mask=in_rest)


@triton.jit
def rotate_store_kernel(
    q,
    k,
    v,
    rotated_q,
    keys,
    values,
    slots,
    cos,
    sin,
    weight,
    k_scales,
    v_scales,
    q_stride,
    k_stride,
    v_stride,
    angle_stride,
    page_stride,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    ROTARY: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    SCALED: tl.constexpr,
    STORE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Heads of one tile of one token, see the module. Without STORE there is q alone."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    Q_TILES: tl.constexpr = (Q_HEADS + TILE - 1) // TILE
    KV_TILES: tl.constexpr = (KV_HEADS + TILE - 1) // TILE
    angle = token * angle_stride
    if tile < Q_TILES:
        head = tile * TILE + tl.arange(0, TILE)[:, None]
        _rotate_heads(
            q + token * q_stride, rotated_q + token * (Q_HEADS * SIZE), k_scales, weight, cos + angle, sin + angle,
            head, head < Q_HEADS, eps, SIZE, SIZE, ROTARY, HALF_WIDTH, REST_WIDTH, NORM, ROUND_FIRST, False,
        )  # fmt: skip
    elif STORE:
        slot = tl.load(slots + token)
        if slot >= 0:
            place = (slot // PAGE) * page_stride + (slot % PAGE) * SIZE
            head = ((tile - Q_TILES) % KV_TILES) * TILE + tl.arange(0, TILE)[:, None]
            live = head < KV_HEADS
            if tile < Q_TILES + KV_TILES:
                _rotate_heads(
                    k + token * k_stride, keys + place, k_scales, weight + Q_HEADS * SIZE, cos + angle, sin + angle,
                    head, live, eps, PAGE * SIZE, SIZE, ROTARY, HALF_WIDTH, REST_WIDTH, NORM, ROUND_FIRST, SCALED,
                )  # fmt: skip
            else:
                copy_heads(v + token * v_stride, values + place, v_scales, head, live, PAGE * SIZE, SIZE, WIDTH, SCALED)


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: HeadTurn,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    *,
    scales: KvScales | None = None,
) -> Tensor:
    """q as it is to be used, dense [T, H, D] of its dtype; k and v are in their pages.

    Args:
        keys, values: [pages, KV, P, D], pages equally far apart in both.
        slots: [T] int64.
        scales: what a float8 pool's numbers are multiplied by when they are read; None stores as it is.
    """
    require_heads(k, v)
    assert scales is not None or keys.dtype.itemsize > 1, f"a pool of {keys.dtype} without scales"
    return _launch(q, turn, _Place(k, v, keys, values, slots, page_stride_of(keys, values), scales))


def rotate(x: Tensor, turn: HeadTurn) -> Tensor:
    """Heads x [T, H, D] as `rotate_and_store` makes them of q, where nothing is stored yet."""
    return _launch(x, turn, None)


class _Place(NamedTuple):
    """K and V, and where they go."""

    k: Tensor
    v: Tensor
    keys: Tensor
    values: Tensor
    slots: Tensor
    page_stride: int
    scales: KvScales | None


def _launch(q: Tensor, turn: HeadTurn, place: _Place | None) -> Tensor:
    cos, sin, norm = turn
    rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not len(q):
        return rotated
    require_heads(q)
    assert cos.stride() == sin.stride() == (cos.stride(0), 1), f"angles of strides {cos.stride()}, {sin.stride()}"
    nowhere = _Place(q, q, q[:, :, None], q, q, 0, None)
    k, v, keys, values, slots, page_stride, scales = place or nowhere
    constants = rotate_store_constants(
        q.shape[1],
        keys.shape,
        rotary=cos.shape[1],
        norm=norm is not None,
        round_first=norm is not None and norm.weight.dtype == q.dtype,
        scaled=scales is not None,
        store=place is not None,
    )
    tile = constants["TILE"]
    tiles = triton.cdiv(q.shape[1], tile) + (0 if place is None else 2 * triton.cdiv(k.shape[1], tile))
    rotate_store_kernel[(len(q), tiles)](
        q, k, v, rotated, keys, values, slots, cos, sin, q if norm is None else norm.weight, *(scales or (q, q)),
        q.stride(0), k.stride(0), v.stride(0), cos.stride(0), page_stride, 0.0 if norm is None else norm.eps,
        **constants, num_warps=warps_of(tile, constants["HALF_WIDTH"]), enable_fp_fusion=False,
    )  # fmt: skip
    return rotated


def rotate_store_constants(
    q_heads: int, pool: torch.Size, *, rotary: int, norm: bool, round_first: bool, scaled: bool, store: bool
) -> dict[str, int | bool]:
    """What `rotate_store_kernel` is compiled for; `pool` is the shape of one layer's keys."""
    size = pool[3]
    assert rotary in range(2, size + 1, 2), f"a rotation of {rotary} of {size} dimensions"
    return {
        "Q_HEADS": q_heads,
        "ROTARY": rotary,
        "HALF_WIDTH": triton.next_power_of_2(rotary // 2),
        "REST_WIDTH": triton.next_power_of_2(max(1, size - rotary)),
        "NORM": norm,
        "ROUND_FIRST": round_first,
        "STORE": store,
    } | store_constants(pool, scaled=scaled)
