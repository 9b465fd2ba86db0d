"""Pools with something in them, and `ForwardBatch`es over them, for tests below the scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem_engine.forward.batch import ForwardBatch, ForwardMode, SamplingBatch, TokenMasks
from tandem_engine.forward.logit_edits import LogitEdits
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.attention.backend import AttentionSpec

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 4, 2, 16
"""Heads as in `tiny_checkpoints`, so that all tests share the same compiled kernels."""

PLAIN = (AttentionSpec(scale=HEAD_DIM**-0.5),) * NUM_LAYERS
"""Attention of every layer of `make_pool`."""


def make_pool(
    *,
    page_size: int = 16,
    num_pages: int = 64,
    dtype: torch.dtype = torch.float32,
    num_kv_heads: int = NUM_KV_HEADS,
) -> KvPool:
    """A pool full of random numbers, with a scale of its own for each head if it is of float8."""
    pool = KvPool(
        num_pages=num_pages,
        num_layers=NUM_LAYERS,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        page_size=page_size,
        dtype=dtype,
        device="cpu",
    )
    if pool.scales is not None:
        pool.set_scales(torch.rand(pool.scales.shape, generator=torch.Generator().manual_seed(3)) + 0.5)
    pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(1)))
    return pool


@dataclass(frozen=True, kw_only=True)
class Seq:
    """One sequence of a step: the last `extend_len` of `seq_len` tokens are computed, on `pages`."""

    seq_len: int
    extend_len: int = 1
    decode: bool = False
    pages: Sequence[int] = ()
    row: int = 1
    input_ids: Sequence[int] = ()
    samples: bool = True


@dataclass(kw_only=True)
class PageDealer:
    """Gives sequences pages in a scrambled order, never the same page twice."""

    pool: KvPool
    pages: list[int] = field(init=False)

    def __post_init__(self) -> None:
        order = torch.randperm(self.pool.num_pages - 1, generator=torch.Generator().manual_seed(2)) + 1
        self.pages = order.tolist()

    def seq(self, seq_len: int, extend_len: int = 1, *, decode: bool = False) -> Seq:
        count = -(-seq_len // self.pool.page_size)
        pages = [self.pages.pop() for _ in range(count)]
        return Seq(seq_len=seq_len, extend_len=extend_len, decode=decode, pages=pages)

    def decode(self, seq_len: int) -> Seq:
        return self.seq(seq_len, decode=True)


def greedy_sampling(count: int) -> SamplingBatch:
    return make_sampling(temperature=[0.0] * count, all_greedy=True)


def make_sampling(
    *,
    temperature: Sequence[float],
    top_k: Sequence[int] | None = None,
    top_p: Sequence[float] | None = None,
    min_p: Sequence[float] | None = None,
    seed: Sequence[int] | None = None,
    position: Sequence[int] | None = None,
    suppress: tuple[tuple[int, ...], ...] = (),
    logprobs: tuple[int, ...] = (),
    logprob_ids: torch.Tensor | None = None,
    all_greedy: bool = False,
    edits: LogitEdits | None = None,
    masks: TokenMasks | None = None,
) -> SamplingBatch:
    """As many rows as temperatures; what is not given filters nothing."""
    count = len(temperature)
    return SamplingBatch(
        temperature=torch.tensor(temperature, dtype=torch.float32),
        top_k=torch.tensor(top_k or [0] * count, dtype=torch.int64),
        top_p=torch.tensor(top_p or [1.0] * count, dtype=torch.float32),
        min_p=torch.tensor(min_p or [0.0] * count, dtype=torch.float32),
        seed=torch.tensor(seed or [0] * count, dtype=torch.int64),
        position=torch.tensor(position or [0] * count, dtype=torch.int64),
        suppress=suppress,
        logprobs=logprobs,
        logprob_ids=logprob_ids,
        all_greedy=all_greedy,
        edits=edits,
        masks=masks,
    )


def make_batch(
    sequences: Sequence[Seq], *, page_size: int = 16, sampling: SamplingBatch | None = None, step: int = 0
) -> ForwardBatch:
    """EXTEND sequences first, then DECODE ones, as the contract wants; greedy unless told otherwise."""
    num_extend = sum(not seq.decode for seq in sequences)
    assert not any(seq.decode for seq in sequences[:num_extend]), "EXTEND sequences come first"
    width = max((len(seq.pages) for seq in sequences), default=1)
    table = torch.zeros((len(sequences), width), dtype=torch.int32)
    for index, seq in enumerate(sequences):
        table[index, : len(seq.pages)] = torch.tensor(seq.pages, dtype=torch.int32)
    positions = [torch.arange(seq.seq_len - seq.extend_len, seq.seq_len) for seq in sequences]
    slots = [table[index, p // page_size].long() * page_size + p % page_size for index, p in enumerate(positions)]
    ids = [token for seq in sequences for token in seq.input_ids or [0] * seq.extend_len]
    sample_index = [index for index, seq in enumerate(sequences) if seq.samples]
    return ForwardBatch(
        step=step,
        mode=_mode(num_extend, len(sequences)),
        input_ids=_ints(ids),
        positions=_cat(positions),
        out_cache_loc=_cat(slots),
        rows=_ints([seq.row for seq in sequences]),
        seq_lens=_ints([seq.seq_len for seq in sequences]),
        extend_lens=_ints([seq.extend_len for seq in sequences]),
        page_table=table,
        num_extend=num_extend,
        sample_index=_ints(sample_index),
        sampling=sampling or greedy_sampling(len(sample_index)),
    )


def make_qkv(
    num_tokens: int, *, dtype: torch.dtype = torch.float32, seed: int = 0, num_kv_heads: int = NUM_KV_HEADS
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q [T, heads, D] and k, v [T, kv_heads, D], tokens further apart than their own heads, as a model's are."""
    generator = torch.Generator().manual_seed(seed)
    heads = NUM_HEADS + 2 * num_kv_heads
    qkv = torch.randn(num_tokens, heads, HEAD_DIM, generator=generator).to(dtype)
    q, k, v = qkv.split_with_sizes((NUM_HEADS, num_kv_heads, num_kv_heads), dim=1)
    return q, k, v


def _mode(num_extend: int, total: int) -> ForwardMode:
    if total == 0:
        return ForwardMode.IDLE
    if num_extend == 0:
        return ForwardMode.DECODE
    return ForwardMode.EXTEND if num_extend == total else ForwardMode.MIXED


def _ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else _ints([])
