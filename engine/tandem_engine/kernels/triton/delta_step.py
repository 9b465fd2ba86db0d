"""One token of each of several sequences by the gated delta rule, from projection to gated output. Bound by bandwidth.

    x = silu(conv(newest inputs))                         the inputs of the convolution move on by one
    q, k = unit(x of q) / √K, unit(x of k)                rounded to the model's dtype before
    g = decay · softplus(a + bias), beta = sigmoid(b)
    S = exp(g) S,  change = beta (v − kᵀS),  S = S + k changeᵀ,  o = qᵀS
    out = o / rms(o) · weight · silu(z)

`model.layers.delta_rule` has the rule. A program has a key head of a sequence, with the value heads that share it: what
it reads of a state and of the inputs no other program writes. A state is read once and written once.

    projected  [N, ≥ channels + VALUES · V], tokens any distance apart: [q | k | v | z], head after head
    rates      [N, 2 · VALUES], tokens any distance apart: [b | a]
    inputs     [slots, TAPS - 1, channels] and matrices [slots, VALUES, K, V] float32 of one layer, dense but for slots
    out        [N, VALUES · V]

Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_engine.kernels.interface import DeltaWeights

NORM_EPS = tl.constexpr(1e-6)
"""Of keys and queries; `delta_rule.NORM_EPS`."""


@triton.jit
def moved_on(
    projected, inputs, conv, channel, live, kept, CHANNELS: tl.constexpr, TAPS: tl.constexpr, DTYPE: tl.constexpr
):
    """The convolution of `channel` [B] at the new token, float32 rounded to DTYPE; moves its inputs on.

    kept     channels whose inputs in the slot count: all, or none
    """
    known = live & (channel < kept)
    new = tl.load(projected + channel, mask=live, other=0.0)
    mixed = new.to(tl.float32) * tl.load(conv + (TAPS - 1) * CHANNELS + channel, mask=live, other=0.0)
    for tap in tl.static_range(TAPS - 1):
        old = tl.load(inputs + tap * CHANNELS + channel, mask=known, other=0.0)
        mixed += old.to(tl.float32) * tl.load(conv + tap * CHANNELS + channel, mask=live, other=0.0)
    # Another thread may have an input that this one overwrites.
    tl.debug_barrier()
    for tap in tl.static_range(TAPS - 2):
        old = tl.load(inputs + (tap + 1) * CHANNELS + channel, mask=known, other=0.0)
        tl.debug_barrier()
        tl.store(inputs + tap * CHANNELS + channel, old, mask=live)
    tl.store(inputs + (TAPS - 2) * CHANNELS + channel, new, mask=live)
    return (mixed / (1.0 + tl.exp(-mixed))).to(DTYPE).to(tl.float32)


@triton.jit
def unit(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + NORM_EPS)


@triton.jit(do_not_specialize_on_alignment=["rates", "rows", "fresh"])
def delta_step_kernel(
    projected,
    rates,
    inputs,
    matrices,
    rows,
    fresh,
    conv,
    decay,
    bias,
    weight,
    out,
    eps,
    projected_stride,
    rates_stride,
    inputs_stride,
    matrices_stride,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Key head j of sequence i; program (i, j)."""
    CHANNELS: tl.constexpr = 2 * KEYS * K + VALUES * V
    SHARED: tl.constexpr = VALUES // KEYS
    sequence, key_head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(rows + sequence)
    if slot >= 0:
        kept = (1 - tl.load(fresh + sequence).to(tl.int32)) * CHANNELS
        projected += sequence.to(tl.int64) * projected_stride
        rates += sequence.to(tl.int64) * rates_stride
        inputs += slot * inputs_stride
        matrices += slot * matrices_stride
        of_key, of_value = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
        live_key, live_value = of_key < K, of_value < V
        at = key_head * K + of_key
        q = unit(moved_on(projected, inputs, conv, at, live_key, kept, CHANNELS, TAPS, out.dtype.element_ty)) * K**-0.5
        k = unit(moved_on(projected, inputs, conv, KEYS * K + at, live_key, kept, CHANNELS, TAPS, out.dtype.element_ty))
        for shared in range(SHARED):
            head = key_head * SHARED + shared
            own = head * V + of_value
            channel = 2 * KEYS * K + own
            v = moved_on(projected, inputs, conv, channel, live_value, kept, CHANNELS, TAPS, out.dtype.element_ty)
            a = tl.load(rates + VALUES + head).to(tl.float32) + tl.load(bias + head)
            beta = tl.sigmoid(tl.load(rates + head).to(tl.float32))
            softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
            remains = tl.exp(tl.load(decay + head) * softplus)
            place = matrices + (head * K + of_key)[:, None] * V + of_value[None, :]
            live = live_key[:, None] & live_value[None, :]
            state = tl.load(place, mask=live & (of_value < kept)[None, :], other=0.0) * remains
            change = (v - tl.sum(state * k[:, None], axis=0)) * beta
            state += k[:, None] * change[None, :]
            tl.store(place, state, mask=live)
            read = tl.sum(state * q[:, None], axis=0)
            scale = tl.rsqrt(tl.sum(read * read, axis=0) / V + eps)
            z = tl.load(projected + CHANNELS + own, mask=live_value, other=0.0).to(tl.float32)
            gated = read * scale * tl.load(weight + of_value, mask=live_value, other=0.0) * (z / (1.0 + tl.exp(-z)))
            tl.store(out + sequence.to(tl.int64) * (VALUES * V) + own, gated.to(out.dtype.element_ty), mask=live_value)


def delta_step(
    projected: Tensor,
    rates: Tensor,
    inputs: Tensor,
    matrices: Tensor,
    rows: Tensor,
    fresh: Tensor,
    weights: DeltaWeights,
) -> Tensor:
    """Gated outputs [N, value heads * value_size] of one token of each sequence; changes the states in `rows`.

    Args:
        projected, rates: [N, …] as above.
        inputs, matrices: of all slots, of one layer.
        rows: [N] int64 slots; only that of padding may occur twice. One below 0 is no sequence: its outputs are left as
            they are in memory.
        fresh: [N] bool, whose state is zero, whatever the slot holds.
    """
    _, values, key_size, value_size = matrices.shape
    channels = inputs.shape[2]
    keys = (channels - values * value_size) // (2 * key_size)
    for dense, name in ((projected, "projected"), (rates, "rates")):
        assert dense.stride(1) == 1, f"{name} of strides {dense.stride()}"
    assert inputs.stride()[1:] == (channels, 1), f"inputs of strides {inputs.stride()}"
    assert matrices.stride()[1:] == (key_size * value_size, value_size, 1), f"matrices of strides {matrices.stride()}"
    out = torch.empty((len(rows), values * value_size), dtype=projected.dtype, device=projected.device)
    constants = delta_constants(keys=keys, values=values, key_size=key_size, value_size=value_size)
    delta_step_kernel[(len(rows), keys)](
        projected, rates, inputs, matrices, rows, fresh.view(torch.uint8),
        weights.conv, weights.decay, weights.bias, weights.norm, out, weights.eps,
        projected.stride(0), rates.stride(0), inputs.stride(0), matrices.stride(0),
        TAPS=len(weights.conv), **constants, num_warps=warps_of(constants),
    )  # fmt: skip
    return out


def delta_constants(*, keys: int, values: int, key_size: int, value_size: int) -> dict[str, int]:
    """What the kernel is compiled for, but for the taps."""
    return {
        "KEYS": keys,
        "VALUES": values,
        "K": key_size,
        "V": value_size,
        "BLOCK_K": triton.next_power_of_2(key_size),
        "BLOCK_V": triton.next_power_of_2(value_size),
    }


def warps_of(constants: dict[str, int]) -> int:
    """A thread has 64 numbers of a state."""
    return max(1, min(8, constants["BLOCK_K"] * constants["BLOCK_V"] // 2048))
