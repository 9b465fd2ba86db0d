"""What the step kernel is given: one record of numbers and addresses, and the arrays that they stand for."""

from typing import Any, NamedTuple

import numpy as np

from tandem_engine.attention.pieces import Array

QKV, OUTPUT, GATE_UP, DOWN = range(4)
"""Rows of `projections`, for each layer,"""
PROJECTIONS = 4
ADDRESS, PANEL_BYTES, BIAS = range(3)
"""and their columns: address of the panels, bytes from one to the next, address of the bias or 0."""
PROJECTION_COLUMNS = 3

PHASES_OF_LAYER = 6

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
    page_table, tasks, groups, members, queries     as `attention.paged_kernel.ATTEND` has them; every
                    token is that of a query
    head_parts      groups of attention are cut into so many by K/V heads: 1, or KV
    phases          [2 + 6 L, PHASE_BYTES] zeros
    out             [S, E] of the model's dtype

scratch
    hidden [T, E], qkv [T, (H + 2 KV) · D], query [T, H, D], partial [tasks, H, D + STATISTICS], gate_up [T, 2 I]

of the model
    size, inner     E, I
    embedding       [embedding_size] of the model's dtype. Row r begins at r // OUTPUTS · embedding_panel
                    + r % OUTPUTS · embedding_row; word after word, of one number or two, follows by embedding_step
    angles          [num_positions, 2, D] of the model's dtype: `RotaryTable.angles`
    projections     [L, PROJECTIONS, PROJECTION_COLUMNS] int64; biases are float32
    head_norm       [L, H + KV, D], or 0 when heads are not normalised
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
    """[0, H + KV, D] when heads are not normalised."""
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
