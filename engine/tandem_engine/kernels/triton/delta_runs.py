"""Runs of tokens of several sequences by the gated delta rule, whose lengths the host need not know.

`model.layers.delta_rule.prompt` has the form: within a chunk the corrections are a triangular system, and only chunks
follow one another. Products within chunks are torch's, of many chunks at once. Here is what torch has no launch for:

    unit_lower_inverse   of each chunk and head: (I + L)⁻¹ of a strictly lower triangular L, row after row
    walk_runs            of each sequence: chunk after chunk
                             change = fresh − stale S,  out = q S + a change,  S = w S + kᵀ change
                         The state lies in its slot all the while, and is copied where a chunk says so

    system      float32 [C, H, CHUNK, CHUNK]
    solved      float32 [C, H, CHUNK, V + K]: fresh, stale
    query, key  float32 [C, H, CHUNK, K], attention [C, H, CHUNK, CHUNK], whole [C, H]; all dense
    matrices    float32 [slots, H, K, V] of one layer, dense but for slots
    out         float32 [C · CHUNK, H, V]; a place without a token means nothing

A program of `walk_runs` has some columns of the state of a head, which no other program reads or writes, and which
stay in a cache: 16 KiB. float32 is multiplied as three products of tf32, which lose about as much as one of float32.

Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024; the inverse as in flash-linear-attention.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_engine.kernels.triton.common import facts_of

CHUNK = 64
"""Tokens of a chunk: `memory.cache_groups.STATE_CHUNK`."""

COLUMNS = 32
"""Of a state, in one program."""

SMALLEST = 16
"""Side of a product."""

LARGE_SHARED = 200 << 10
"""Bytes of shared memory of a block from which a device multiplies from there, and leaves registers free."""


@triton.jit
def unit_lower_inverse_kernel(system, out, SIZE: tl.constexpr):
    """Matrix i [SIZE, SIZE]; program i. What `system` has on its diagonal and above is not read as numbers."""
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    place = tl.program_id(0).to(tl.int64) * (SIZE * SIZE) + row * SIZE + column
    inverse = tl.where(row > column, -tl.load(system + place), 0.0)
    for last in range(1, SIZE):
        own = tl.sum(tl.where(row == last, inverse, 0.0), axis=0)
        own += tl.sum(own[:, None] * inverse, axis=0)
        inverse = tl.where(row == last, own[None, :], inverse)
    tl.store(out + place, inverse + tl.where(row == column, 1.0, 0.0))


@triton.jit(do_not_specialize_on_alignment=["rows", "fresh", "first_chunks", "slots"])
def walk_runs_kernel(
    solved,
    query,
    key,
    attention,
    whole,
    matrices,
    rows,
    fresh,
    first_chunks,
    slots,
    out,
    matrices_stride,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Columns [j · BLOCK_V, (j + 1) · BLOCK_V) of head h of sequence i; program (i, h, j)."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(first_chunks + sequence).to(tl.int64)
    end = tl.load(first_chunks + sequence + 1).to(tl.int64)
    if end > first:
        token, part_key = tl.arange(0, SIZE), tl.arange(0, DEPTH)
        column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        live_column = (column < V)[None, :]
        # Columns of the slot that count before the first chunk: all, or none.
        kept = (1 - tl.load(fresh + sequence).to(tl.int32)) * V
        state = matrices + tl.load(rows + sequence) * matrices_stride + head * (K * V)
        for chunk in range(first, end):
            part = chunk * HEADS + head
            solved_row = solved + part * (SIZE * (V + K)) + token[:, None] * (V + K)
            change = tl.load(solved_row + column[None, :], mask=live_column, other=0.0)
            read = tl.zeros((SIZE, BLOCK_V), tl.float32)
            for start in range(0, K, DEPTH):
                of_key = start + part_key
                live_key = (of_key < K)[None, :]
                known = (of_key < K)[:, None] & (column < kept)[None, :]
                before = tl.load(state + of_key[:, None] * V + column[None, :], mask=known, other=0.0)
                stale = tl.load(solved_row + V + of_key[None, :], mask=live_key, other=0.0)
                change -= tl.dot(stale, before, input_precision="tf32x3")
                at = query + part * (SIZE * K) + token[:, None] * K + of_key[None, :]
                read = tl.dot(tl.load(at, mask=live_key, other=0.0), before, read, input_precision="tf32x3")
            inside = tl.load(attention + part * (SIZE * SIZE) + token[:, None] * SIZE + token[None, :])
            read = tl.dot(inside, change, read, input_precision="tf32x3")
            place = (chunk * SIZE + token)[:, None] * (HEADS * V) + head * V + column[None, :]
            tl.store(out + place, read, mask=live_column)
            remains, copied = tl.load(whole + part), tl.load(slots + chunk)
            copy = matrices + copied * matrices_stride + head * (K * V)
            # No thread writes what another has yet to read.
            tl.debug_barrier()
            for start in range(0, K, DEPTH):
                of_key = start + part_key
                live = (of_key < K)[:, None] & live_column
                known = (of_key < K)[:, None] & (column < kept)[None, :]
                at = of_key[:, None] * V + column[None, :]
                after = tl.load(state + at, mask=known, other=0.0) * remains
                # [DEPTH, SIZE], transposed where it lies.
                keys = key + part * (SIZE * K) + token[None, :] * K + of_key[:, None]
                keys = tl.load(keys, mask=(of_key < K)[:, None], other=0.0)
                after = tl.dot(keys, change, after, input_precision="tf32x3")
                tl.store(state + at, after, mask=live)
                if copied > 0:
                    tl.store(copy + at, after, mask=live)
            # The next chunk's threads read what others of this program have written.
            tl.debug_barrier()
            kept = tl.maximum(kept, V)


def unit_lower_inverse(system: Tensor) -> Tensor:
    """(I + L)⁻¹ of what lies below the diagonals of `system` [C, H, CHUNK, CHUNK], dense float32."""
    assert system.shape[-2:] == (CHUNK, CHUNK), f"systems of shape {tuple(system.shape)}"
    assert system.is_contiguous(), f"systems of strides {system.stride()}"
    out = torch.empty_like(system)
    unit_lower_inverse_kernel[(system.shape[0] * system.shape[1],)](system, out, SIZE=CHUNK, num_warps=4)
    return out


def walk_runs(
    solved: Tensor,
    query: Tensor,
    key: Tensor,
    attention: Tensor,
    whole: Tensor,
    matrices: Tensor,
    rows: Tensor,
    fresh: Tensor,
    first_chunks: Tensor,
    slots: Tensor,
) -> Tensor:
    """What tokens read of their states, as `out` above; moves the states on, and copies them.

    Args:
        rows: [N] int64 slots of the sequences; only that of padding may occur twice, for sequences without chunks.
        fresh: [N] bool, whose state is zero, whatever the slot holds.
        first_chunks: [N + 1] int32, the chunks of each sequence.
        slots: [C] int64, where the state after a chunk is copied to; 0 for nowhere.
    """
    chunks, heads, _, key_size = query.shape
    value_size = matrices.shape[3]
    for dense in (solved, query, key, attention, whole):
        assert dense.is_contiguous(), f"strides {dense.stride()} of a tensor of shape {tuple(dense.shape)}"
    assert matrices.stride()[1:] == (key_size * value_size, value_size, 1), f"matrices of strides {matrices.stride()}"
    out = torch.empty((chunks * CHUNK, heads, value_size), dtype=torch.float32, device=query.device)
    constants = walk_constants(
        heads=heads, key_size=key_size, value_size=value_size, shared_bytes=facts_of(query.device).shared_bytes
    )
    walk_runs_kernel[(len(rows), heads, triton.cdiv(value_size, constants["BLOCK_V"]))](
        solved, query, key, attention, whole, matrices, rows, fresh.view(torch.uint8), first_chunks, slots, out,
        matrices.stride(0), **constants, num_warps=WALK_WARPS, num_stages=1,
    )  # fmt: skip
    return out


WALK_WARPS = 4


def walk_constants(*, heads: int, key_size: int, value_size: int, shared_bytes: int) -> dict[str, int]:
    """What `walk_runs_kernel` is compiled for, on a device with so much shared memory for a block."""
    return {
        "HEADS": heads,
        "K": key_size,
        "V": value_size,
        "SIZE": CHUNK,
        # Rows of a state that are multiplied together: more leave no registers for three products of tf32.
        "DEPTH": 32 if shared_bytes >= LARGE_SHARED else SMALLEST,
        "BLOCK_V": max(SMALLEST, min(COLUMNS, triton.next_power_of_2(value_size))),
    }
