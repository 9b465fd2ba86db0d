"""Self-attention around the one operation that depends on other tokens, and rotary position embedding.

    (norm) ─▶ qkv ─▶ (q, k norm) ─▶ rotate ─▶ attend ─▶ output ─▶ (norm) ─▶ added to the hidden states
                     └── on a device by the plan ──┘

All rotations turn dimension i with i + D/2. Checkpoints that turn other pairs, or only the first dimensions of a head,
have the rows of q and k reordered when they are read (`rotary_order`); scores do not depend on the order. Pairs that
do not rotate have an angle of 0, so no kernel distinguishes them.

Shapes use  T = tokens of the step, H = query heads, KV = key/value heads, D = head_dim.

`Rotation` has the scalings of Hugging Face checkpoints. With each of them, cos and sin are a pure function of a token's
own position, so they are tabulated once when the model is built. That makes pages sharable: a key is stored rotated,
and must not depend on which prompt, chunk, batch or worker computed it.

Dynamic NTK is the exception: beyond the original context transformers derives its base from the longest position of the
*call*, so that a key depends on how the prompt was cut. Such models are limited to the original context
(`config_fields.longest_context`), in which nothing is scaled.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tandem_engine.config import QueryScale, RopeConfig
from tandem_engine.kernels.interface import HeadNorm, HeadTurn, by_triton
from tandem_engine.model.attention.backend import Attend, TurningPlan
from tandem_engine.model.layers.linear import Delta, Projection, project
from tandem_engine.model.layers.norm import Norm


class Rotation(NamedTuple):
    """Angles of one step's tokens, shared by all layers and heads. Both [T, 1, D]."""

    cos: Tensor
    signed_sin: Tensor
    """sin, negated in the first half: rotate_half(x) * sin equals roll(x) * signed_sin."""
    query_scale: Tensor | None = None
    """[T, 1, 1], factor of q."""

    def apply(self, x: Tensor) -> Tensor:
        """Rotate [T, heads, D]; same shape and dtype."""
        if by_triton(x.device):
            from tandem_engine.kernels.triton.rope_store import rotate

            return rotate(x, self.turn(None))
        half = x.shape[-1] // 2
        return (x * self.cos).add_(torch.roll(x, half, -1).mul_(self.signed_sin))

    def turn(self, norm: HeadNorm | None) -> HeadTurn:
        """This rotation behind `norm`, for a plan that turns heads itself."""
        return HeadTurn(self.cos.squeeze(1), self.signed_sin.squeeze(1), norm)


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryTable:
    """cos and signed sin of every position that a sequence may have."""

    angles: Tensor
    """[positions, 2, D] in the model's dtype, computed in float32."""
    query_scales: Tensor | None = None
    """[positions, 1, 1] in the model's dtype, factor of q at each position."""

    def at(self, positions: Tensor) -> Rotation:
        """Angles of [T] int64 positions."""
        rows = self.angles.index_select(0, positions)
        cos, signed_sin = rows.split_with_sizes((1, 1), dim=1)
        scales = self.query_scales
        return Rotation(cos, signed_sin, None if scales is None else scales.index_select(0, positions))


def rotary_table(
    rope: RopeConfig,
    *,
    head_dim: int,
    positions: int,
    dtype: torch.dtype,
    device: torch.device,
    query_scale: QueryScale | None = None,
) -> RotaryTable:
    """Tabulate positions [0, positions)."""
    position = torch.arange(positions, dtype=torch.float32)
    width = rope.rotary_dim or head_dim
    half = position[:, None] * inverse_frequencies(rope, head_dim=width, positions=positions)
    scale, still = attention_scale(rope), (0, (head_dim - width) // 2)
    cos, sin = F.pad(half.cos() * scale, still, value=1.0), F.pad(half.sin() * scale, still)
    angles = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
    scales = None
    if query_scale is not None:
        periods = ((position + query_scale.offset) / query_scale.period).floor()
        scales = (1 + query_scale.beta * (1 + periods).log())[:, None, None].to(device=device, dtype=dtype)
    return RotaryTable(angles=angles.to(device=device, dtype=dtype), query_scales=scales)


def rotary_order(rope: RopeConfig, *, head_dim: int) -> Tensor | None:
    """int64 [D]: the dimension of a checkpoint's head that stands at each place of ours; None where both are equal."""
    width = rope.rotary_dim or head_dim
    if width == head_dim and not rope.interleaved:
        return None
    turning, still = torch.arange(width), torch.arange(width, head_dim)
    first, second = (turning[::2], turning[1::2]) if rope.interleaved else turning.chunk(2)
    passed, rest = still.chunk(2) if len(still) else (still, still)
    return torch.cat((first, passed, second, rest))


def order_of_outputs(order: Tensor | None, query: int, kv: int, *, size: int, gates: bool) -> Tensor | None:
    """int64: which of the stacked outputs of q, k and v stands at each place; None as they are.

    `order` of the dimensions of a head as of `rotary_order`. `gates`: those of q are a query and a gate for each head,
    and the gates are left out.
    """
    if order is None and not gates:
        return None
    stride = 2 * size if gates else size
    keys = query * stride
    values = keys + kv * size
    heads = torch.cat((torch.arange(0, keys, stride), torch.arange(keys, values, size)))
    turned = heads[:, None] + (torch.arange(size) if order is None else order)
    return torch.cat((turned.view(-1), torch.arange(values, values + kv * size)))


def inverse_frequencies(rope: RopeConfig, *, head_dim: int, positions: int = 0) -> Tensor:
    """Radians per position of each pair of dimensions: float32 [D/2].

    Args:
        head_dim: D, the dimensions that rotate.
        positions: context of the engine, for rotations that depend on it (`model.long_context`).
    """
    match rope.rope_type:
        case "longrope":
            factors = rope.long_factors if positions > _original(rope) else rope.short_factors
            return torch.as_tensor(1.0 / (torch.tensor(factors) * rope.theta ** _exponents(head_dim)))
        case "default" | "dynamic":
            return _plain(rope.theta, head_dim)
        case "linear":
            return _plain(rope.theta, head_dim) / rope.factor
        case "proportional" | "none":
            turning = _plain(rope.theta, head_dim)[: rope.turning_pairs] / rope.factor
            return F.pad(turning, (0, head_dim // 2 - rope.turning_pairs))
        case "llama3":
            return _llama3(rope, head_dim)
        case "yarn":
            return _yarn(rope, head_dim)
    raise AssertionError(f"rope type {rope.rope_type!r} passed configuration but has no frequencies")


def attention_scale(rope: RopeConfig) -> float:
    """Factor on cos and sin, so that q·k carries its square: the temperature of YaRN and longrope, else 1."""
    if rope.rope_type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type == "longrope":
        return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(_original(rope)))
    if rope.mscale and rope.mscale_all_dim:
        return rope.yarn_mscale(rope.mscale) / rope.yarn_mscale(rope.mscale_all_dim)
    return rope.yarn_mscale(1.0)


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _plain(theta: float, head_dim: int) -> Tensor:
    return torch.as_tensor(1.0 / (theta ** _exponents(head_dim)))


def _llama3(rope: RopeConfig, head_dim: int) -> Tensor:
    """Long wavelengths interpolated by `factor`, short ones kept, a linear blend between."""
    original, low, high = _original(rope), rope.low_freq_factor, rope.high_freq_factor
    plain = _plain(rope.theta, head_dim)
    wavelength = 2 * math.pi / plain
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    scaled = torch.where(wavelength > original / low, plain / rope.factor, blended)
    return torch.where(wavelength < original / high, plain, scaled)


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """Dimensions that turn often are kept, those that turn seldom interpolated, a ramp between."""
    turns = rope.theta ** _exponents(head_dim)
    low, high = _yarn_ramp_bounds(rope, head_dim)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp_(0, 1)
    return torch.as_tensor(1.0 / (rope.factor * turns) * (1 - kept) + 1.0 / turns * kept)


def _yarn_ramp_bounds(rope: RopeConfig, head_dim: int) -> tuple[float, float]:
    def dimension_turning(times: float) -> float:
        return head_dim * math.log(_original(rope) / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high + 0.001 if low == high else high


def _original(rope: RopeConfig) -> int:
    assert rope.original_max_position is not None, f"rope type {rope.rope_type} needs original_max_position"
    return rope.original_max_position


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfAttention:
    """Everything of attention that does not depend on the other tokens."""

    norm: Norm
    """Before the block; applied by the decoder, which adds to the hidden states on the way."""
    qkv: Projection
    qk_norm: Norm | None
    """Of each head before its rotation, of weight [H + KV, D]: one operation for all heads of q and k."""
    output: Projection
    output_norm: Norm | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    whole_norm: Norm | None = None
    """Of all heads together, before their rotation."""
    rotated_norm: Norm | None = None
    """Of each head after its rotation."""
    value_norm: Norm | None = None
    """Of each head of v."""
    sinks: Tensor | None = None
    """float32 [H], see `AttentionSpec.sinks`."""

    def attend(
        self, layer: int, normed: Tensor, rotation: Rotation, attend: Attend, delta: Delta | None = None
    ) -> Tensor:
        """Normalized hidden states [T, hidden] to what each token gathered, [T, H * D]; `project` is yet to come.

        `delta`: what adapters add to q, k and v.
        """
        rotated, num_kv = self.num_heads + self.num_kv_heads, self.num_kv_heads
        heads = project(self.qkv, normed, delta).view(normed.shape[0], rotated + num_kv, self.head_dim)
        if rotation.query_scale is not None:
            heads[:, : self.num_heads].mul_(rotation.query_scale)
        qk, v = heads.split_with_sizes((rotated, num_kv), dim=1)
        if self.value_norm is not None:
            v = self.value_norm(v)
        if self.whole_norm is not None:
            qk = self.whole_norm(qk)
        if self.rotated_norm is None and isinstance(attend, TurningPlan):
            q, k = qk.split_with_sizes((self.num_heads, num_kv), dim=1)
            norm = None if self.qk_norm is None else HeadNorm(self.qk_norm.weight, self.qk_norm.eps)
            return attend.turn_and_attend(layer, q, k, v, rotation.turn(norm))
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = rotation.apply(qk)
        if self.rotated_norm is not None:
            qk = self.rotated_norm(qk)
        q, k = qk.split_with_sizes((self.num_heads, num_kv), dim=1)
        return attend(layer, q, k, v)

    def project(self, gathered: Tensor, delta: Delta | None = None) -> Tensor:
        """What `attend` returned to what is added to the hidden states. `delta`: what adapters add to the product."""
        out = project(self.output, gathered, delta)
        return out if self.output_norm is None else self.output_norm(out)
