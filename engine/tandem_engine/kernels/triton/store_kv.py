"""K and V of a step's tokens on their way to their pages.

    k, v   ─▶ (÷ the head's scale, clamped to the largest number) ─▶ the pool's dtype ─▶ pages

Shapes: k and v [T, KV, D], heads dense and tokens as far apart as their projection left them. One layer's keys and
values are views [pages, KV, P, D] of a page-major pool, whose pages may be any distance apart. `slots` [T] int64 are
page · P + offset; a token with a negative slot (padding) is written nowhere, and slots of page 0 are any token's.
Float8 pools, of e4m3 (a device of compute capability 8.9 or more) or e5m2, have scales [KV] float32, for K and for V,
and get the bits that `float8` gives them.

Tiling: program (t, i) has TILE heads of token t, k's first. Each number is read and written once. TILE is no larger
than the heads of K ask for: threads without numbers keep others off a multiprocessor, and bandwidth takes many.

Source: the write as in vLLM's reshape_and_cache and SGLang's set_kv_buffer, here one head of a page as one run.
"""

import torch
import triton
import triton.language as tl
from torch import Size, Tensor

from tandem_engine.kernels.interface import KvScales
from tandem_engine.kernels.triton.common import float8_code, interpreted

MIN_TILE, MAX_TILE = 4, 16
"""Heads of a program."""

_INTERPRETED = tl.constexpr(interpreted())
_MAX_E4M3 = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)
_MAX_E5M2 = tl.constexpr(torch.finfo(torch.float8_e5m2).max)


@triton.jit
def stored(x, scale, SCALED: tl.constexpr, DTYPE: tl.constexpr):
    """`x` as the pool has it. What is too large for float8 becomes the largest number, not infinity or NaN."""
    if SCALED:
        LARGEST: tl.constexpr = _MAX_E5M2 if tl.float8e5 == DTYPE else _MAX_E4M3
        x = tl.clamp(tl.math.div_rn(x, scale), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        if _INTERPRETED:
            return float8_code(x, DTYPE)
    return x.to(DTYPE)


@triton.jit
def copy_heads(
    source,
    target,
    scales,
    head,
    live,
    TARGET_STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Rows `head` of SIZE numbers from a dense source to a target whose rows are TARGET_STRIDE apart."""
    column = tl.arange(0, WIDTH)[None, :]
    live = live & (column < SIZE)
    x = tl.load(source + head * SIZE + column, mask=live, other=0.0)
    scale = 1.0
    if SCALED:
        x = x.to(tl.float32)
        scale = tl.load(scales + head, mask=live, other=1.0)
    tl.store(target + head * TARGET_STRIDE + column, stored(x, scale, SCALED, target.dtype.element_ty), mask=live)


@triton.jit
def store_kernel(
    k,
    v,
    keys,
    values,
    slots,
    k_scales,
    v_scales,
    k_stride,
    v_stride,
    page_stride,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Heads of one tile of k, or of v, of one token."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    KV_TILES: tl.constexpr = (KV_HEADS + TILE - 1) // TILE
    slot = tl.load(slots + token)
    if slot >= 0:
        place = (slot // PAGE) * page_stride + (slot % PAGE) * SIZE
        head = (tile % KV_TILES) * TILE + tl.arange(0, TILE)[:, None]
        live = head < KV_HEADS
        if tile < KV_TILES:
            copy_heads(k + token * k_stride, keys + place, k_scales, head, live, PAGE * SIZE, SIZE, WIDTH, SCALED)
        else:
            copy_heads(v + token * v_stride, values + place, v_scales, head, live, PAGE * SIZE, SIZE, WIDTH, SCALED)


def store_kv(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, *, scales: KvScales | None = None
) -> None:
    """Write k and v [T, KV, D] to their pages; arguments as those of `rotate_and_store`."""
    if not len(k):
        return
    require_heads(k, v)
    constants = store_constants(keys.shape, scaled=scales is not None)
    store_kernel[(len(k), 2 * triton.cdiv(k.shape[1], constants["TILE"]))](
        k, v, keys, values, slots, *(scales or (k, k)), k.stride(0), v.stride(0), page_stride_of(keys, values),
        **constants, num_warps=warps_of(constants["TILE"], constants["WIDTH"]),
    )  # fmt: skip


def store_latents(latents: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Write latents [T, 1, D] to `pages` [pages, 1, P, D], which have one part: that of K is all there is."""
    if not len(latents):
        return
    require_heads(latents)
    constants = store_constants(pages.shape, scaled=False)
    stride = latents.stride(0)
    store_kernel[(len(latents), 1)](
        latents, latents, pages, pages, slots, latents, latents, stride, stride, page_stride_of(pages, pages),
        **constants, num_warps=warps_of(constants["TILE"], constants["WIDTH"]),
    )  # fmt: skip


def store_constants(pool: Size, *, scaled: bool) -> dict[str, int | bool]:
    """What `store_kernel` is compiled for."""
    _, kv_heads, page, size = pool
    return {
        "KV_HEADS": kv_heads,
        "SIZE": size,
        "PAGE": page,
        "WIDTH": triton.next_power_of_2(size),
        "SCALED": scaled,
        "TILE": max(MIN_TILE, min(MAX_TILE, triton.next_power_of_2(kv_heads))),
    }


def warps_of(tile: int, width: int) -> int:
    """Of a program with `tile` rows of `width`: a thread has 8 numbers of each tile, if there are as many."""
    return max(1, min(8, tile * width // 256))


def require_heads(*heads: Tensor) -> None:
    for x in heads:
        assert x.stride()[1:] == (x.shape[2], 1), f"heads of strides {x.stride()}"


def page_stride_of(keys: Tensor, values: Tensor) -> int:
    _, _, page, size = keys.shape
    dense = (page * size, size, 1)
    assert keys.stride()[1:] == values.stride()[1:] == dense, f"pages of strides {keys.stride()}, {values.stride()}"
    assert keys.stride(0) == values.stride(0), f"pages of K {keys.stride(0)} apart, of V {values.stride(0)}"
    return keys.stride(0)
