"""What a layer does to each token alone, beside its projections: pieces of kernels.

The same arithmetic as `model.layers`, rounded to the model's dtype where those round.
"""

import numpy as np

from tandem_engine.attention.cpu_kernels import exp_shifted
from tandem_engine.attention.pieces import Array, inlined
from tandem_engine.model.fused.numbers import narrowed, rounded, widened


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


@inlined
def place_heads(
    heads: Array,
    angles: Array,
    head_norm: Array,
    eps: float,
    layer: int,
    place: int,
    query: Array,
    pages: Array,
    head_dim: int,
) -> None:
    """One token's q, k and v, float32 [H + 2 KV, D]: q rotated to `query` [H, D], k rotated and v to their slot.

    `heads` is scratch afterwards. `head_norm` is [L, H + KV, D], or [0, …] when heads are not normalised.
    """
    page, slot = divmod(place, pages.shape[4])
    num_query, num_kv = query.shape[0], pages.shape[3]
    for head in range(num_query + num_kv):
        if head_norm.shape[0] > 0:
            norm_row(heads[head], head_norm[layer, head], eps, heads[head], angles, head_dim)
        _rotate(heads[head], angles, head_dim)
    for head in range(num_query):
        for d in range(head_dim):
            query[head, d] = heads[head, d]
    for head in range(num_kv):
        for d in range(head_dim):
            pages[page, layer, 0, head, slot, d] = narrowed(heads[num_query + head, d], pages)
            pages[page, layer, 1, head, slot, d] = narrowed(heads[num_query + num_kv + head, d], pages)


@inlined
def _rotate(x: Array, angles: Array, head_dim: int) -> None:
    """x [D] = x · cos + (x, its halves swapped) · signed sin, of `angles` [2, D]."""
    half = head_dim // 2
    for d in range(half):
        low, high = x[d], x[half + d]
        x[d] = rounded(
            rounded(low * widened(angles[0, d]), angles) + rounded(high * widened(angles[1, d]), angles), angles
        )
        x[half + d] = rounded(
            rounded(high * widened(angles[0, half + d]), angles) + rounded(low * widened(angles[1, half + d]), angles),
            angles,
        )


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
