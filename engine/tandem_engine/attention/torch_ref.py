"""Attention as one would write it on a board. The truth that faster backends are tested against.

Every sequence gathers its slots from the pool and computes one masked softmax in float32, for any page
size and mode, on any device. Nothing here is meant to be fast.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_engine.forward.forward_batch import ForwardBatch
from tandem_engine.memory.pool import KvPool


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
    out_cache_loc: Tensor
    sequences: tuple[Sequence, ...]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pool.store(layer, k, v, self.out_cache_loc)
        out = torch.empty_like(q)
        for sequence in self.sequences:
            keys, values = (self._gather(side, sequence.slots) for side in self.pool.key_value(layer))
            part = slice(sequence.start, sequence.stop)
            out[part] = _attend(q[part].float(), keys, values, sequence.prefix_len).to(q.dtype)
        return out.flatten(1)

    def _gather(self, side: Tensor, slots: Tensor) -> Tensor:
        """[pages, kv_heads, page_size, head_dim] -> float32 [seq_len, kv_heads, head_dim]."""
        return side[slots // self.pool.page_size, :, slots % self.pool.page_size].float()


class TorchReferenceBackend:
    """Implements `AttentionBackend`."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool

    def plan(self, batch: ForwardBatch) -> TorchReferencePlan:
        page_size = self._pool.page_size
        sequences = []
        start = 0
        for index, extend_len in enumerate(batch.extend_lens.tolist()):
            positions = torch.arange(int(batch.seq_lens[index]), device=batch.page_table.device)
            pages = batch.page_table[index, positions // page_size].long()
            slots = pages * page_size + positions % page_size
            sequences.append(Sequence(start=start, stop=start + extend_len, slots=slots))
            start += extend_len
        return TorchReferencePlan(pool=self._pool, out_cache_loc=batch.out_cache_loc, sequences=tuple(sequences))

    def warm_up(self) -> None:
        """Nothing to compile."""


def _attend(q: Tensor, keys: Tensor, values: Tensor, prefix_len: int) -> Tensor:
    """q [T, heads, D], keys and values [seq_len, kv_heads, D]; token t sees [0, prefix_len + t]."""
    group = q.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(group, dim=1)
    values = values.repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,shd->hts", q, keys) * q.shape[-1] ** -0.5
    seen = torch.arange(len(keys), device=q.device) <= prefix_len + torch.arange(len(q), device=q.device)[:, None]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("hts,shd->thd", weights, values)
