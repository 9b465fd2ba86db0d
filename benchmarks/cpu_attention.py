"""Decode attention on a CPU: the paged kernel against gathering pages for torch's fused attention (ADR 0002).

    python benchmarks/cpu_attention.py [--threads N] [--dtype float32] [--heads 4] [--kv-heads 2] [--head-dim 64]
                                       [--window 0] [--soft-cap 0] [--shared 0]

Prints what one thread reads from memory in blocks of a page and in long runs, then one JSON object per
(batch, context): microseconds per layer of both ways, and the K and V bytes the kernel needs per second, those of a
page once however many sequences have it.
Layers take turns, so that contexts too large for the caches come from memory as they do in a model.
"""

import argparse
import json
import time
from collections.abc import Callable

import numba
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from tandem_engine.forward.batch import ForwardBatch, ForwardMode, SamplingBatch
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.attention.backend import AttentionSpec
from tandem_engine.model.attention.cpu import CpuAttention

PAGE_SIZE, NUM_LAYERS = 16, 6
CONTEXTS = (128, 512, 2048, 8192)
BATCHES = (1, 8, 64)
LARGEST = 64 * 2048
"""Tokens of the largest case: 768 MiB of float32 pages at the default sizes."""


def best_us(run: Callable[[int], object]) -> float:
    """Microseconds of the fastest call; `run` is given the layer to use."""
    seconds = []
    deadline = time.perf_counter() + 1.0
    while len(seconds) < 3 * NUM_LAYERS or time.perf_counter() < deadline:
        started = time.perf_counter()
        run(len(seconds) % NUM_LAYERS)
        seconds.append(time.perf_counter() - started)
    return min(seconds[NUM_LAYERS:]) * 1e6


def decode_batch(batch: int, context: int, shared: int) -> ForwardBatch:
    """`batch` sequences of `context` tokens on pages in scrambled order, the first `shared` on the same pages."""
    pages, common = context // PAGE_SIZE, min(shared, context - 1) // PAGE_SIZE
    table = (torch.randperm(batch * pages) + 1).view(batch, pages).int()
    table[:, :common] = table[0, :common].clone()
    ones, none = torch.ones(batch, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    empty = torch.empty(0)
    return ForwardBatch(
        step=0,
        mode=ForwardMode.DECODE,
        input_ids=ones,
        positions=ones * (context - 1),
        out_cache_loc=table[:, -1].long() * PAGE_SIZE + PAGE_SIZE - 1,
        rows=ones,
        seq_lens=ones * context,
        extend_lens=ones,
        page_table=table,
        num_extend=0,
        sample_index=none,
        sampling=SamplingBatch(temperature=empty, top_k=none, top_p=empty, min_p=empty, seed=none, position=none),
    )


def gathered(pool: KvPool, batch: ForwardBatch, layer: int, q: torch.Tensor) -> torch.Tensor:
    """What the kernel saves: a copy of all pages of the batch, then fused attention."""
    count, context = batch.num_sequences, int(batch.seq_lens[0])
    pages = batch.page_table.view(-1).long()
    keys, values = (
        side[pages].view(count, -1, *side.shape[1:]).transpose(1, 2).reshape(count, side.shape[1], context, -1)
        for side in pool.key_value(layer)
    )
    return scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)


@numba.njit(fastmath=True)
def read_blocks(blocks: np.ndarray, order: np.ndarray) -> float:
    """Sum of all numbers, block by block in the given order."""
    total = np.float32(0.0)
    for index in order:
        block = blocks[index]
        part = np.float32(0.0)
        for i in range(block.shape[0]):
            part += block[i]
        total += part
    return total


def memory_gb_per_s(block_bytes: int) -> float:
    """What one thread reads from memory in blocks of this size in scrambled order."""
    blocks = np.ones((512 * 2**20 // block_bytes, block_bytes // 4), np.float32)
    order = np.random.default_rng(0).permutation(len(blocks))
    read_blocks(blocks, order[:1])
    started = time.perf_counter()
    read_blocks(blocks, order)
    return blocks.nbytes / (time.perf_counter() - started) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--window", type=int, default=0, help="newest tokens that count; 0 is all (paged alone)")
    parser.add_argument("--soft-cap", type=float, default=0.0, help="bound of the scores; 0 is none (paged alone)")
    parser.add_argument("--shared", type=int, default=0, help="first tokens that all sequences of a batch share")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    print(json.dumps({"memory_gb_per_s": {size: round(memory_gb_per_s(size), 1) for size in (16384, 2**22)}}))
    pool = KvPool(
        num_pages=LARGEST // PAGE_SIZE + 1,
        num_layers=NUM_LAYERS,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        page_size=PAGE_SIZE,
        dtype=dtype,
        device="cpu",
    )
    pool.data.normal_()
    spec = AttentionSpec(scale=args.head_dim**-0.5, window=args.window or None, soft_cap=args.soft_cap or None)
    backend = CpuAttention(pool, num_heads=args.heads, specs=(spec,) * NUM_LAYERS)
    backend.warm_up()
    for count in BATCHES:
        for context in (context for context in CONTEXTS if count * context <= LARGEST):
            report(args, pool, backend, decode_batch(count, context, args.shared))


@torch.inference_mode()
def report(args: argparse.Namespace, pool: KvPool, backend: CpuAttention, batch: ForwardBatch) -> None:
    count, context = batch.num_sequences, int(batch.seq_lens[0])
    q = torch.randn(count, args.heads, args.head_dim).to(pool.data.dtype)
    kv = torch.randn(count, args.kv_heads, args.head_dim).to(pool.data.dtype)
    plan = backend.plan(batch)
    paged_us = best_us(lambda layer: plan(layer, q, kv, kv))
    gathered_us = best_us(lambda layer: gathered(pool, batch, layer, q))
    first = max(context - args.window, 0) if args.window else 0
    tokens = batch.page_table[:, first // PAGE_SIZE :].unique().numel() * PAGE_SIZE
    read = tokens * 2 * args.kv_heads * args.head_dim * pool.data.element_size()
    result = {
        "batch": count,
        "context": context,
        "paged_us": round(paged_us),
        "gathered_us": round(gathered_us),
        "gb_per_s": round(read / paged_us / 1e3, 1),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
