"""Attention in its plainest form: the reference that faster backends are tested against.

Every sequence gathers its slots from the pool and computes one masked softmax in float32, for any page size, mode and
`AttentionSpec`, on any device. It is not meant to be fast.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_engine.forward.batch import ForwardBatch
from tandem_engine.forward.prompt_shape import PromptShape
from tandem_engine.kernels.span import Span
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.attention.backend import AttentionSpec
from tandem_engine.model.attention.prompt_tensors import PromptTensors, load_prompt

MAX_SCORES = 1 << 26
"""Numbers of float32: those of a long prompt's tokens with all their keys do not fit memory."""


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

    def parts(self, heads: int) -> Iterator[slice]:
        """Tokens of the batch whose scores are in memory together, at least one."""
        tokens = max(1, MAX_SCORES // (heads * len(self.slots)))
        for start in range(self.start, self.stop, tokens):
            yield slice(start, min(start + tokens, self.stop))


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchReferencePlan:
    """Implements `Attend`."""

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
            for part in sequence.parts(q.shape[1]):
                seen = sequence.prefix_len + part.stop - sequence.start
                prefix_len = seen - (part.stop - part.start)
                rows = attend_dense(q[part].float(), keys[:seen], values[:seen], prefix_len, self.specs[layer])
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

    def prepare(self) -> None:
        """Nothing: each layer looks at what is loaded."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend.__call__`."""
        self.pool.store(layer, k, v, self.slots)
        return attend_each(q, self.pool, layer, self.specs[layer], self.page_table, self.seq_lens)


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchPromptPlan:
    """Implements `PromptGraphPlan`: every token attends as a decode that has the pages of its sequence."""

    pool: KvPool
    specs: Ordered[AttentionSpec]
    page_table: Tensor
    extend_lens: Tensor
    seq_lens: Tensor
    slots: Tensor

    def load(self, batch: ForwardBatch) -> None:
        """See `GraphPlan.load`."""
        load_prompt(self, batch)

    def prepare(self) -> None:
        """Nothing: each layer looks at what is loaded."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend.__call__`."""
        self.pool.store(layer, k, v, self.slots)
        ends = self.extend_lens.cumsum(0)
        token = torch.arange(len(q), device=q.device)
        row = torch.searchsorted(ends, token, right=True)
        seq_lens = self.seq_lens.index_select(0, row) - (ends.index_select(0, row) - 1 - token)
        return attend_each(q, self.pool, layer, self.specs[layer], self.page_table.index_select(0, row), seq_lens)


class TorchReferenceBackend:
    """Implements `GraphBackend`. Nothing of it waits for a device: lengths are looked at on the host."""

    captures_prompts = False
    """A captured token reads all pages that its sequence could have."""

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

    def prompt_graph_plan(self, shape: PromptShape, max_pages: int) -> TorchPromptPlan:
        """See `GraphBackend.prompt_graph_plan`."""
        pool = self._pool
        tensors = PromptTensors.of_padding(shape, max_pages, page_size=pool.page_size, device=pool.data.device)
        return TorchPromptPlan(pool=pool, specs=self._specs, **tensors._asdict())

    def warm_up(self) -> None:
        """Nothing to compile."""


def attend_each(
    q: Tensor, pool: KvPool, layer: int, spec: AttentionSpec, page_table: Tensor, seq_lens: Tensor
) -> Tensor:
    """q [T, heads, D] over what `pool` has of `layer`, to [T, heads * W]: token t sees `seq_lens[t]` tokens in the
    pages `page_table[t]`.
    """
    page_size, kv_heads = pool.page_size, pool.data.shape[3]
    pages = page_table.long()[:, :, None].expand(-1, -1, page_size).flatten()
    slots = torch.arange(page_size, device=q.device).repeat(page_table.numel())
    # [T * tokens, kv_heads, D] to [T, tokens, kv_heads, D]
    keys, values = (part.view(len(q), -1, *part.shape[1:]) for part in pool.gathered(layer, pages, slots))
    scores = torch.einsum("rkgd,rskd->rkgs", _grouped(q.float(), kv_heads), keys) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    position = torch.arange(page_table.shape[1] * page_size, device=q.device)
    seen = position < seq_lens[:, None]
    if spec.span is not None:
        seen &= position >= _first_seen(seq_lens[:, None] - 1, spec.span)
    sinks = None if spec.sinks is None else spec.sinks.view(kv_heads, -1)[..., None]
    weights = _softmax(scores.masked_fill(~seen[:, None, None], -torch.inf), sinks)
    return torch.einsum("rkgs,rskd->rkgd", weights, values).to(q.dtype).flatten(1)


def attend_dense(q: Tensor, keys: Tensor, values: Tensor, prefix_len: int, spec: AttentionSpec) -> Tensor:
    """q [T, heads, D] over keys [S, kv_heads, D] and values [S, kv_heads, W], all float32, to [T, heads, W].

    Token t stands at position prefix_len + t. It sees positions up to its own, those of `spec.span`.
    """
    scores = torch.einsum("tkgd,skd->kgts", _grouped(q, keys.shape[1]), keys) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    position = prefix_len + torch.arange(len(q), device=q.device)[:, None]
    seen_position = torch.arange(len(keys), device=q.device)
    seen = seen_position <= position
    if spec.span is not None:
        seen &= seen_position >= _first_seen(position, spec.span)
    sinks = None if spec.sinks is None else spec.sinks.view(keys.shape[1], -1)[..., None, None]
    weights = _softmax(scores.masked_fill(~seen, -torch.inf), sinks)
    return torch.einsum("kgts,skd->tkgd", weights, values).flatten(1, 2)


def _first_seen(position: Tensor, span: Span) -> Tensor:
    """As `Span.first_seen`, of many positions. It may be negative."""
    return position - position % span.tokens if span.chunked else position + 1 - span.tokens


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the last dimension, together with `sinks`, one score for each row, whose weight is left out."""
    if sinks is None:
        return scores.softmax(dim=-1)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    """[T, heads, D] to [T, kv_heads, heads that read the same one, D]: no key has to be repeated for them."""
    tokens, heads, width = q.shape
    return q.reshape(tokens, kv_heads, heads // kv_heads, width)
