"""Attention in its plainest form: the reference that faster backends are tested against.

Every sequence gathers its slots from the pool and computes one masked softmax in float32, for any page size, mode and
`AttentionSpec`, on any device. It is not meant to be fast.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_engine.forward.batch import ForwardBatch
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.attention.backend import AttentionSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequence:
    """Tokens [start, stop) of the batch: the last of `seq_len` tokens that lie in `slots`."""

    start: int
    stop: int
    slots: Tensor
    """[seq_len] int64 slots of the whole sequence, in order."""

    @property
    def prefix_len(self) -> int:
        return len(self.slots) - (self.stop - self.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchReferencePlan:
    """Implements `AttentionPlan`."""

    pool: KvPool
    specs: Ordered[AttentionSpec]
    out_cache_loc: Tensor
    sequences: tuple[Sequence, ...]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pool.store(layer, k, v, self.out_cache_loc)
        out = q.new_empty((*q.shape[:2], v.shape[-1]))
        for sequence in self.sequences:
            places = sequence.slots // self.pool.page_size, sequence.slots % self.pool.page_size
            keys, values = self.pool.gathered(layer, *places)
            part = slice(sequence.start, sequence.stop)
            rows = attend_dense(q[part].float(), keys, values, sequence.prefix_len, self.specs[layer])
            out[part] = rows.to(q.dtype)
        return out.flatten(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchGraphPlan:
    """Implements `GraphPlan`: every row attends over all the tokens that it might have, most of them masked."""

    pool: KvPool
    specs: Ordered[AttentionSpec]
    page_table: Tensor
    seq_lens: Tensor
    slots: Tensor

    def load(self, batch: ForwardBatch) -> None:
        """See `GraphPlan.load`."""
        self.page_table.zero_()
        self.page_table[:, : batch.page_table.shape[1]].copy_(batch.page_table)
        self.seq_lens.copy_(batch.seq_lens)
        self.slots.copy_(batch.out_cache_loc)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionPlan.__call__`."""
        self.pool.store(layer, k, v, self.slots)
        spec, page_size = self.specs[layer], self.pool.page_size
        pages = self.page_table.long()[:, :, None].expand(-1, -1, page_size).flatten()
        slots = torch.arange(page_size, device=q.device).repeat(self.page_table.numel())
        # [rows * tokens, kv_heads, D] to [rows, tokens, heads, D]
        group = q.shape[1] // k.shape[1]
        keys, values = (
            part.view(len(q), -1, *part.shape[1:]).repeat_interleave(group, dim=2)
            for part in self.pool.gathered(layer, pages, slots)
        )
        scores = torch.einsum("rhd,rshd->rhs", q.float(), keys) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        position = torch.arange(self.page_table.shape[1] * page_size, device=q.device)
        seen = position < self.seq_lens[:, None]
        if spec.window is not None:
            seen &= position >= self.seq_lens[:, None] - spec.window
        sinks = None if spec.sinks is None else spec.sinks[:, None]
        weights = _softmax(scores.masked_fill(~seen[:, None], -torch.inf), sinks)
        return torch.einsum("rhs,rshd->rhd", weights, values).to(q.dtype).flatten(1)


class TorchReferenceBackend:
    """Implements `GraphBackend`. Nothing of it waits for a device: lengths are looked at on the host."""

    def __init__(self, pool: KvPool, *, specs: Ordered[AttentionSpec]) -> None:
        """`specs`: one for each layer of the pool."""
        self._pool = pool
        self._specs = specs

    def plan(self, batch: ForwardBatch) -> TorchReferencePlan:
        page_size = self._pool.page_size
        sequences = []
        start = 0
        lengths = zip(batch.host.extend_lens.tolist(), batch.host.seq_lens.tolist(), strict=True)
        for index, (extend_len, seq_len) in enumerate(lengths):
            positions = torch.arange(seq_len, device=batch.page_table.device)
            pages = batch.page_table[index].long().index_select(0, positions // page_size)
            slots = pages * page_size + positions % page_size
            sequences.append(Sequence(start=start, stop=start + extend_len, slots=slots))
            start += extend_len
        return TorchReferencePlan(
            pool=self._pool, specs=self._specs, out_cache_loc=batch.out_cache_loc, sequences=tuple(sequences)
        )

    def graph_plan(self, max_rows: int, max_pages: int) -> TorchGraphPlan:
        """See `GraphBackend.graph_plan`."""
        device = self._pool.data.device
        return TorchGraphPlan(
            pool=self._pool,
            specs=self._specs,
            page_table=torch.zeros(max_rows, max_pages, dtype=torch.int32, device=device),
            seq_lens=torch.ones(max_rows, dtype=torch.int32, device=device),
            slots=torch.zeros(max_rows, dtype=torch.int64, device=device),
        )

    def warm_up(self) -> None:
        """Nothing to compile."""


def attend_dense(q: Tensor, keys: Tensor, values: Tensor, prefix_len: int, spec: AttentionSpec) -> Tensor:
    """q [T, heads, D] over keys [S, kv_heads, D] and values [S, kv_heads, W], all float32, to [T, heads, W].

    Token t stands at position prefix_len + t. It sees positions up to its own, the newest `spec.window` of them.
    """
    group = q.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(group, dim=1)
    values = values.repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,shd->hts", q, keys) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    position = prefix_len + torch.arange(len(q), device=q.device)[:, None]
    seen_position = torch.arange(len(keys), device=q.device)
    seen = seen_position <= position
    if spec.window is not None:
        seen &= seen_position > position - spec.window
    sinks = None if spec.sinks is None else spec.sinks[:, None, None]
    weights = _softmax(scores.masked_fill(~seen, -torch.inf), sinks)
    return torch.einsum("hts,shd->thd", weights, values)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the last dimension, together with `sinks`, one score for each row, whose weight is left out."""
    if sinks is None:
        return scores.softmax(dim=-1)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
