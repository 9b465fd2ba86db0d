"""All layers of a decode step as one compiled call that does not hold the interpreter lock.

    embedding
    for each layer
        norm ─▶ q, k, v ─▶ (norm of heads) ─▶ rotate, k and v to their pages ─▶ attend over pages ─▶ output ─(+)
        norm ─▶ gate, up ─▶ silu(gate) · up ─▶ down ─(+)
    norm of the wanted tokens

The same arithmetic in the same order as `model.layers` and `attention.cpu`, down to sums that are taken in another
order. What a step of small batches costs beyond arithmetic, a dozen calls a layer that each let go of the lock and
take it again, is gone; so the scheduler's thread computes the whole time that this one does.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from tandem_engine.attention import cpu_kernels, vectors
from tandem_engine.attention.cpu_kernels import STATISTICS, Array, attend_queries, compiled_kernel, exp_shifted, inlined
from tandem_engine.compiled import revision_of
from tandem_engine.model.fused import gemm
from tandem_engine.model.fused.gemm import multiply

StackKernel = Callable[
    [Array, Array, Array, Array, Array, Array, Array, Array, "StackArrays", np.float32, np.float32], Array
]
HeadKernel = Callable[[Array, Array], Array]


class StackArrays(NamedTuple):
    """Weights of L layers; float32, those of projections as `gemm.pack` gives them. Biases are [0, …] when absent.

    E = hidden size, H = query heads, KV = key/value heads, D = head_dim, I = intermediate size.
    """

    embedding: Array
    """[V, E]"""
    angles: Array
    """[positions, 2, D]: `RotaryTable.angles`."""
    attention_norm: Array
    """[L, E]"""
    qkv: Array
    """[L, …] of (H + 2 KV) · D outputs."""
    qkv_bias: Array
    """[L, (H + 2 KV) · D]"""
    head_norm: Array
    """[L, H + KV, D], or [0, …] when heads are not normalised."""
    output: Array
    """[L, …] of E outputs."""
    output_bias: Array
    """[L, E]"""
    feed_forward_norm: Array
    """[L, E]"""
    gate_up: Array
    """[L, …] of 2 I outputs."""
    gate_up_bias: Array
    """[L, 2 I]"""
    down: Array
    """[L, …] of E outputs."""
    down_bias: Array
    """[L, E]"""
    norm: Array
    """[E]"""


@cache
def build_stack_kernel(head_dim: int, group: int) -> StackKernel:
    """The step for heads of `head_dim` and `group` query heads per K/V head.

    The kernel's arguments:
        input_ids   [T] int64
        positions   [T] int64
        wanted      [S] int64, indices into T
        slots       [T] int64, where the tokens' K and V go
        pages       [page, layer, 2, KV, slot, D] float32
        page_table, tasks, queries
                    as `attention.cpu_kernels.build_attend_serial` has them; every token is that of a query
        weights
        eps         of all norms
        scale       of attention scores

    Returns the normalised hidden states of the wanted tokens, [S, E].

    Raises `IndexError` for ids outside of the vocabulary and positions beyond the rotary table, as torch would.
    """
    revision = _revision()

    def compute_stack(
        input_ids: Array,
        positions: Array,
        wanted: Array,
        slots: Array,
        pages: Array,
        page_table: Array,
        tasks: Array,
        queries: Array,
        weights: StackArrays,
        eps: np.float32,
        scale: np.float32,
    ) -> Array:
        tokens, kv_heads, size = input_ids.shape[0], pages.shape[3], weights.embedding.shape[1]
        heads = kv_heads * group
        gate_up_size = weights.gate_up.shape[1] * weights.gate_up.shape[3]
        hidden = np.empty((tokens, size), np.float32)
        normed = np.empty((tokens, size), np.float32)
        if revision == 0:  # never: it is mentioned here to be closed over
            return normed
        qkv = np.empty((tokens, (heads + 2 * kv_heads) * head_dim), np.float32)
        query = np.empty((tokens, heads, head_dim), np.float32)
        gathered = np.empty((tokens, heads, head_dim), np.float32)
        partial = np.empty((tasks.shape[0], heads, head_dim + STATISTICS), np.float32)
        gate_up = np.empty((tokens, gate_up_size), np.float32)
        inner = np.empty((tokens, gate_up_size // 2), np.float32)
        exponents = np.empty(gate_up_size // 2, np.int32)
        for token in range(tokens):
            if not 0 <= input_ids[token] < weights.embedding.shape[0]:
                raise IndexError("a token id lies outside of the vocabulary")
            if not 0 <= positions[token] < weights.angles.shape[0]:
                raise IndexError("a position lies beyond those that the model was built for")
            hidden[token] = weights.embedding[input_ids[token]]
        for layer in range(weights.qkv.shape[0]):
            _norm_rows(hidden, weights.attention_norm[layer], eps, normed)
            multiply(normed, weights.qkv[layer], qkv, False)
            _add_bias(qkv, weights.qkv_bias, layer)
            for token in range(tokens):
                _place_heads(
                    qkv[token].reshape(heads + 2 * kv_heads, head_dim),
                    weights.angles[positions[token]],
                    weights.head_norm,
                    eps,
                    layer,
                    slots[token],
                    query[token],
                    pages,
                    head_dim,
                )
            attend_queries(
                pages, layer, query, scale, np.float32(0.0), page_table, tasks, queries, partial, gathered,
                head_dim, group, False,
            )  # fmt: skip
            multiply(gathered.reshape(tokens, heads * head_dim), weights.output[layer], hidden, True)
            _add_bias(hidden, weights.output_bias, layer)
            _norm_rows(hidden, weights.feed_forward_norm[layer], eps, normed)
            multiply(normed, weights.gate_up[layer], gate_up, False)
            _add_bias(gate_up, weights.gate_up_bias, layer)
            for token in range(tokens):
                _silu_and_multiply(gate_up[token], inner[token], exponents)
            multiply(inner, weights.down[layer], hidden, True)
            _add_bias(hidden, weights.down_bias, layer)
        out = np.empty((wanted.shape[0], size), np.float32)
        for index in range(wanted.shape[0]):
            _norm(hidden[wanted[index]], weights.norm, eps, out[index], size)
        return out

    return compiled_kernel(compute_stack)  # type: ignore[no-any-return]


@cache
def build_head_kernel() -> HeadKernel:
    """x [N, E] times the panels of a weight [V, E] to a new [N, V]."""
    revision = _revision()

    def compute_head(x: Array, panels: Array) -> Array:
        out = np.empty((x.shape[0], panels.shape[0] * panels.shape[2]), np.float32)
        if revision == 0:  # never, as above
            return out
        multiply(x, panels, out, False)
        return out

    return compiled_kernel(compute_head)  # type: ignore[no-any-return]


def _revision() -> int:
    """What kernels close over, because they are made of other files' code too, and of this machine's panels."""
    return revision_of(cpu_kernels, vectors, gemm, constant=vectors.PANEL)


@inlined
def _norm_rows(rows: Array, weight: Array, eps: float, out: Array) -> None:
    """out [T, E] = rows / sqrt(mean(rows²) + eps) · weight."""
    for row in range(rows.shape[0]):
        _norm(rows[row], weight, eps, out[row], rows.shape[1])


@inlined
def _norm(x: Array, weight: Array, eps: float, out: Array, size: int) -> None:
    """The same for one row of `size` numbers; `out` may be `x`."""
    total = np.float32(0.0)
    for i in range(size):
        total += x[i] * x[i]
    factor = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
    for i in range(size):
        out[i] = x[i] * factor * weight[i]


@inlined
def _add_bias(rows: Array, bias: Array, layer: int) -> None:
    """rows [T, N] += bias[layer], if there is one."""
    if bias.shape[0] == 0:
        return
    for row in range(rows.shape[0]):
        for i in range(rows.shape[1]):
            rows[row, i] += bias[layer, i]


@inlined
def _place_heads(
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
    """One token's q, k and v, [H + 2 KV, D]: q rotated to `query` [H, D], k rotated and v to their slot."""
    page, slot = divmod(place, pages.shape[4])
    num_query, num_kv = query.shape[0], pages.shape[3]
    for head in range(num_query + num_kv):
        if head_norm.shape[0] > 0:
            _norm(heads[head], head_norm[layer, head], eps, heads[head], head_dim)
        if head < num_query:
            _rotate(heads[head], angles, query[head], head_dim)
        else:
            _rotate(heads[head], angles, pages[page, layer, 0, head - num_query, slot], head_dim)
    for head in range(num_kv):
        for d in range(head_dim):
            pages[page, layer, 1, head, slot, d] = heads[num_query + num_kv + head, d]


@inlined
def _rotate(x: Array, angles: Array, out: Array, head_dim: int) -> None:
    """out [D] = x · cos + (x, its halves swapped) · signed sin, of `angles` [2, D]."""
    half = head_dim // 2
    for d in range(half):
        low, high = x[d], x[half + d]
        out[d] = low * angles[0, d] + high * angles[1, d]
        out[half + d] = high * angles[0, half + d] + low * angles[1, half + d]


@inlined
def _silu_and_multiply(gate_up: Array, out: Array, exponents: Array) -> None:
    """out [I] = gate / (1 + e^(−gate)) · up. By e^(−|gate|), which no gate lets overflow."""
    size = out.shape[0]
    for i in range(size):
        out[i] = -np.abs(gate_up[i])
    exp_shifted(out, exponents, size, np.float32(0.0))
    for i in range(size):
        gate, decay = gate_up[i], out[i]
        share = decay if gate < np.float32(0.0) else np.float32(1.0)
        out[i] = gate * share / (np.float32(1.0) + decay) * gate_up[size + i]
