"""All layers of a step of few tokens as one compiled call that releases the interpreter lock.

    embedding
    for each layer, a phase for each ─▶
        norm ─▶ q, k, v ─▶ (norm of heads) rotate, k and v to their pages ─▶ attend over pages ─▶ output ─▶(+)
        norm ─▶ gate, up ─▶ silu(gate) · up, down ─▶(+)
    norm of the wanted tokens

The arithmetic is that of `model.layers` and `model.attention.cpu`, rounded at the same places, except for the order of
sums. The call saves what small batches cost beyond arithmetic: a dozen calls per layer that each release and reacquire
the lock. So the scheduler's thread runs during the whole step.

Any number of threads may run the kernel on one record. They share the tasks of each phase (`kernels.cpu.threads`):
panels of weights, tokens, parts of attention. Each thread computes cheap parts (norms, activations) for itself, which
is faster than waiting for another. No result depends on which thread computes it.

Steps in which tokens have adapters are another kernel, which adds to each product what they do
(`kernels.cpu.step_products`). The kernel of all other steps has nothing of it.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core import types as numba_types

from tandem_engine.kernels.cpu.attention_work import GROUP_COLUMNS, QUERY_COLUMNS, STATISTICS, merge_queries
from tandem_engine.kernels.cpu.gemm import OUTPUTS, WORD_BYTES
from tandem_engine.kernels.cpu.kept import kept
from tandem_engine.kernels.cpu.numbers import narrowed, widened
from tandem_engine.kernels.cpu.paged_attention import (
    AttendGroup,
    Scratch,
    Work,
    build_attend_group,
    build_scratch,
)
from tandem_engine.kernels.cpu.pieces import Array, compiled_callback, inlined
from tandem_engine.kernels.cpu.row_ops import PlaceHeads, build_place_heads, norm_row, norm_rows, silu_and_multiply
from tandem_engine.kernels.cpu.step_products import (
    ADAPTER_COLUMNS,
    DOWN,
    GATE_UP,
    OUTPUT,
    PROJECTION_COLUMNS,
    PROJECTIONS,
    QKV,
    Adapters,
    expand,
    panels_of,
    product_of_panels,
    product_with_adapters,
    shrink,
)
from tandem_engine.kernels.cpu.threads import PHASE_BYTES, array_at, finish, is_open, take, wait

PHASES_OF_LAYER = 6


def phases_of(layers: int, *, adapted: bool) -> int:
    """Of a step. Those of adapters, two for each product, come after all others."""
    return 2 + PHASES_OF_LAYER * layers + (2 * PROJECTIONS * layers if adapted else 0)


STEP = np.dtype(
    [
        (name, np.int64)
        for name in (
            "refused",
            "tokens",
            "wanted_tokens",
            "input_ids",
            "positions",
            "wanted",
            "slots",
            "pages",
            "num_layers",
            "num_kv_heads",
            "page_size",
            "page_table",
            "table_width",
            "tasks",
            "num_tasks",
            "groups",
            "num_groups",
            "members",
            "head_parts",
            "queries",
            "num_queries",
            "phases",
            "hidden",
            "qkv",
            "query",
            "partial",
            "gate_up",
            "out",
            "size",
            "inner",
            "vocabulary",
            "embedding",
            "embedding_size",
            "embedding_panel",
            "embedding_row",
            "embedding_step",
            "num_positions",
            "angles",
            "projections",
            "attention_norm",
            "head_norm",
            "feed_forward_norm",
            "norm",
            "adapters",
            "num_adapters",
            "adapted_tokens",
            "num_adapted_tokens",
            "low",
            "low_rows",
            "delta",
            "delta_outputs",
        )
    ]
    + [("eps", np.float32), ("scale", np.float32)]
)
"""Arrays are addresses. Those of the model's dtype hold float32, or bfloat16 seen as uint16; others float32 if not
noted.

    T = tokens, S = wanted tokens, L = layers, E = hidden size, H = query heads, KV = K/V heads, D = head_dim,
    I = intermediate size

of the step
    refused         set to 1 when an id or a position is in no table; then nothing is computed
    input_ids, positions, slots [T], wanted [S]     int64
    pages           [page, L, 2, KV, slot, D] of the model's dtype
    page_table, tasks, groups, members, queries     as `kernels.cpu.paged_attention.ATTEND` has them; every
                    token is that of a query
    head_parts      groups of attention are cut into so many by K/V heads: 1, or KV
    phases          [`phases_of`, PHASE_BYTES] zeros
    out             [S, E] of the model's dtype

of a step with adapters
    adapters        [adapters, ADAPTER_COLUMNS] int64
    adapted_tokens  [N] int64: those of each adapter, one adapter after the other
    low             [T, low_rows], scratch
    delta           [T, delta_outputs], scratch

scratch
    hidden [T, E], qkv [T, (H + 2 KV) · D], query [T, H, D], partial [tasks, H, D + STATISTICS], gate_up [T, 2 I]

of the model
    size, inner     E, I
    embedding       [embedding_size] of the model's dtype. Row r begins at r // OUTPUTS · embedding_panel
                    + r % OUTPUTS · embedding_row; word after word, of one number or two, follows by embedding_step
    angles          [num_positions, 2, D] of the model's dtype: `RotaryTable.angles`
    projections     [L, PROJECTIONS, PROJECTION_COLUMNS] int64; biases are float32
    head_norm       [L, H + KV, D], or 0 when heads are not normalized
    attention_norm, feed_forward_norm [L, E], norm [E]
"""


class Model(NamedTuple):
    """Of a step; see `STEP`."""

    embedding: Array
    """[embedding_size]"""
    angles: Array
    projections: Array
    attention_norm: Array
    head_norm: Array
    """[0, H + KV, D] when heads are not normalized."""
    feed_forward_norm: Array
    norm: Array


class Shared(NamedTuple):
    """Arrays of a step that all threads work on; see `STEP`."""

    input_ids: Array
    positions: Array
    slots: Array
    wanted: Array
    pages: Array
    page_table: Array
    tasks: Array
    groups: Array
    members: Array
    queries: Array
    hidden: Array
    qkv: Array
    query: Array
    partial: Array
    gate_up: Array
    out: Array


class Own(NamedTuple):
    """Arrays of one thread."""

    normed: Array
    """[T, E] of the model's dtype"""
    merged: Array
    """[T, H, D]"""
    gathered: Array
    """[T, H · D] of the model's dtype"""
    inner: Array
    """[T, I] of the model's dtype"""
    decay: Array
    """[I]"""
    exponents: Array
    """[I] int32"""
    sums: Array
    """[T, OUTPUTS]"""


Record = Any
"""One `STEP`."""


types: Any = numba_types

StepKernel = Any
"""A compiled callback of the address of a `STEP` record."""

Project = Any
"""`_project_alone` or `_project_adapted`: a product of a layer, for all tokens."""


@kept
def build_step_kernel(dtype: np.dtype[Any], head_dim: int, group: int, *, adapted: bool = False) -> StepKernel:
    """The kernel for a model of `dtype`, heads of `head_dim` and `group` query heads per K/V head.

    `adapted`: for steps in which tokens have adapters.
    """
    project = _project_adapted if adapted else _project_alone
    number = numba.from_dtype(dtype)
    attend_group = build_attend_group(dtype, head_dim, group, capped=False)
    allocate = build_scratch(dtype, head_dim, group, capped=False)
    place_heads = build_place_heads(dtype, head_dim)

    def compute_step(data: Any) -> None:
        work = numba.carray(data, 1)[0]
        tokens, heads = work.tokens, work.num_kv_heads * group
        all_heads = heads + 2 * work.num_kv_heads
        normed_heads = work.num_layers if work.head_norm != 0 else 0
        model = Model(
            embedding=array_at(work.embedding, (work.embedding_size,), number),
            angles=array_at(work.angles, (work.num_positions, 2, head_dim), number),
            projections=array_at(work.projections, (work.num_layers, PROJECTIONS, PROJECTION_COLUMNS), types.int64),
            attention_norm=array_at(work.attention_norm, (work.num_layers, work.size), types.float32),
            head_norm=array_at(work.head_norm, (normed_heads, heads + work.num_kv_heads, head_dim), types.float32),
            feed_forward_norm=array_at(work.feed_forward_norm, (work.num_layers, work.size), types.float32),
            norm=array_at(work.norm, (work.size,), types.float32),
        )
        shared = Shared(
            input_ids=array_at(work.input_ids, (tokens,), types.int64),
            positions=array_at(work.positions, (tokens,), types.int64),
            slots=array_at(work.slots, (tokens,), types.int64),
            wanted=array_at(work.wanted, (work.wanted_tokens,), types.int64),
            pages=array_at(work.pages, (1, work.num_layers, 2, work.num_kv_heads, work.page_size, head_dim), number),
            page_table=array_at(work.page_table, (1, work.table_width), types.int32),
            tasks=array_at(work.tasks, (work.num_tasks, 2), types.int64),
            groups=array_at(work.groups, (work.num_groups, GROUP_COLUMNS), types.int64),
            members=array_at(work.members, (work.num_tasks,), types.int64),
            queries=array_at(work.queries, (work.num_queries, QUERY_COLUMNS), types.int64),
            hidden=array_at(work.hidden, (tokens, work.size), types.float32),
            qkv=array_at(work.qkv, (tokens, all_heads, head_dim), types.float32),
            query=array_at(work.query, (tokens, heads, head_dim), types.float32),
            partial=array_at(work.partial, (work.num_tasks, heads, head_dim + STATISTICS), types.float32),
            gate_up=array_at(work.gate_up, (tokens, 2 * work.inner), types.float32),
            out=array_at(work.out, (work.wanted_tokens, work.size), number),
        )
        if not _has_places(work.vocabulary, shared, model):
            work.refused = 1
            return
        own = Own(
            normed=np.empty((tokens, work.size), dtype),
            merged=np.empty((tokens, heads, head_dim), np.float32),
            gathered=np.empty((tokens, heads * head_dim), dtype),
            inner=np.empty((tokens, work.inner), dtype),
            decay=np.empty(work.inner, np.float32),
            exponents=np.empty(work.inner, np.int32),
            sums=np.empty((tokens, OUTPUTS), np.float32),
        )
        scratch = allocate(_attention(0, work, shared))
        phase = work.phases
        _embed(phase, work, shared, model)
        for layer in range(work.num_layers):
            phase += PHASE_BYTES
            _project_heads(phase, layer, work, shared, model, own, project)
            phase += PHASE_BYTES
            _place_heads(phase, layer, work, shared, model, place_heads)
            phase += PHASE_BYTES
            _attend(phase, _attention(layer, work, shared), shared.groups, work.head_parts, scratch, attend_group)
            phase += PHASE_BYTES
            _project_gathered(phase, layer, work, shared, model, own, head_dim, project)
            phase += PHASE_BYTES
            _project_gates(phase, layer, work, shared, model, own, project)
            phase += PHASE_BYTES
            _project_inner(phase, layer, work, shared, model, own, project)
        _norm_wanted(phase + PHASE_BYTES, work, shared, model)

    return compiled_callback(compute_step, types.void(types.CPointer(numba.from_dtype(STEP))))


@inlined
def _has_places(vocabulary: int, shared: Shared, model: Model) -> bool:
    """Whether every id is in the vocabulary, and every position in the rotary table."""
    for token in range(shared.input_ids.shape[0]):
        if not 0 <= shared.input_ids[token] < vocabulary:
            return False
        if not 0 <= shared.positions[token] < model.angles.shape[0]:
            return False
    return True


@inlined
def _embed(phase: int, work: Record, shared: Shared, model: Model) -> None:
    tokens, numbers_of_word = shared.hidden.shape[0], WORD_BYTES // model.embedding.itemsize
    token = take(phase)
    while token < tokens:
        panel, row = shared.input_ids[token] // OUTPUTS, shared.input_ids[token] % OUTPUTS
        first = panel * work.embedding_panel + row * work.embedding_row
        for i in range(shared.hidden.shape[1]):
            place = first + i // numbers_of_word * work.embedding_step + i % numbers_of_word
            shared.hidden[token, i] = widened(model.embedding[place])
        finish(phase)
        token = take(phase)
    wait(phase, tokens)


@inlined
def _project_heads(
    phase: int, layer: int, work: Record, shared: Shared, model: Model, own: Own, project: Project
) -> None:
    """q, k and v of all tokens."""
    qkv = shared.qkv.reshape(shared.qkv.shape[0], shared.qkv.shape[1] * shared.qkv.shape[2])
    if is_open(phase, panels_of(qkv)):
        norm_rows(shared.hidden, model.attention_norm[layer], work.eps, own.normed)
    project(phase, layer, QKV, own.normed, work, model, own.sums, qkv, False)


@inlined
def _place_heads(phase: int, layer: int, work: Record, shared: Shared, model: Model, place_heads: PlaceHeads) -> None:
    """Each token's q rotated to `query`, k rotated and v to their slots."""
    tokens = shared.query.shape[0]
    token = take(phase)
    while token < tokens:
        place_heads(
            shared.qkv[token],
            model.angles[shared.positions[token]],
            model.head_norm,
            work.eps,
            layer,
            shared.slots[token],
            shared.query[token],
            shared.pages,
        )
        finish(phase)
        token = take(phase)
    wait(phase, tokens)


@inlined
def _attention(layer: int, work: Record, shared: Shared) -> Work:
    return Work(
        pages=shared.pages,
        layer=layer,
        page_table=shared.page_table,
        queries=shared.queries,
        tasks=shared.tasks,
        members=shared.members,
        q=shared.query,
        partial=shared.partial,
        scale=work.scale,
        soft_cap=np.float32(0.0),
    )


@inlined
def _attend(
    phase: int, attention: Work, groups: Array, parts: int, scratch: Scratch, attend_group: AttendGroup
) -> None:
    """Attention over the chunks of all queries, to `partial`."""
    count, heads = groups.shape[0] * parts, attention.pages.shape[3] // parts
    part = take(phase)
    while part < count:
        first = part % parts * heads
        attend_group(attention, scratch, groups[part // parts], first, first + heads)
        finish(phase)
        part = take(phase)
    wait(phase, count)


@inlined
def _project_gathered(
    phase: int, layer: int, work: Record, shared: Shared, model: Model, own: Own, head_dim: int, project: Project
) -> None:
    """What attention gathered, on top of the hidden states."""
    if is_open(phase, panels_of(shared.hidden)):
        merge_queries(shared.queries, shared.partial, own.merged, head_dim)
        tokens, width = own.gathered.shape[0], own.gathered.shape[1]
        merged = own.merged.reshape(tokens, width)
        for token in range(tokens):
            for i in range(width):
                own.gathered[token, i] = narrowed(merged[token, i], own.gathered)
    project(phase, layer, OUTPUT, own.gathered, work, model, own.sums, shared.hidden, True)


@inlined
def _project_gates(
    phase: int, layer: int, work: Record, shared: Shared, model: Model, own: Own, project: Project
) -> None:
    """Gate and up of all tokens."""
    if is_open(phase, panels_of(shared.gate_up)):
        norm_rows(shared.hidden, model.feed_forward_norm[layer], work.eps, own.normed)
    project(phase, layer, GATE_UP, own.normed, work, model, own.sums, shared.gate_up, False)


@inlined
def _project_inner(
    phase: int, layer: int, work: Record, shared: Shared, model: Model, own: Own, project: Project
) -> None:
    """silu(gate) · up through `down`, on top of the hidden states."""
    if is_open(phase, panels_of(shared.hidden)):
        for token in range(own.inner.shape[0]):
            silu_and_multiply(shared.gate_up[token], own.inner[token], own.decay, own.exponents)
    project(phase, layer, DOWN, own.inner, work, model, own.sums, shared.hidden, True)


@inlined
def _norm_wanted(phase: int, work: Record, shared: Shared, model: Model) -> None:
    index = take(phase)
    while index < shared.wanted.shape[0]:
        norm_row(shared.hidden[shared.wanted[index]], model.norm, work.eps, shared.out[index], shared.out, work.size)
        finish(phase)
        index = take(phase)


@inlined
def _project_alone(
    phase: int,
    layer: int,
    product: int,
    x: Array,
    work: Record,  # noqa: ARG001 - see `Project`
    model: Model,
    sums: Array,
    out: Array,
    added: bool,
) -> None:
    product_of_panels(phase, x, model.projections[layer, product], sums, out, added)


@inlined
def _project_adapted(
    phase: int,
    layer: int,
    product: int,
    x: Array,
    work: Record,
    model: Model,
    sums: Array,
    out: Array,
    added: bool,
) -> None:
    adapters = Adapters(
        each=array_at(work.adapters, (work.num_adapters, ADAPTER_COLUMNS), types.int64),
        tokens=array_at(work.adapted_tokens, (work.num_adapted_tokens,), types.int64),
        low=array_at(work.low, (x.shape[0], work.low_rows), types.float32),
        delta=array_at(work.delta, (x.shape[0], work.delta_outputs), types.float32),
    )
    place = layer * PROJECTIONS + product
    if is_open(phase, panels_of(out)):
        first = work.phases + (2 + PHASES_OF_LAYER * work.num_layers + 2 * place) * PHASE_BYTES
        shrink(first, place, adapters, x)
        expand(first + PHASE_BYTES, place, out.shape[1], adapters)
    product_with_adapters(phase, x, model.projections[layer, product], sums, out, added, place, adapters)
