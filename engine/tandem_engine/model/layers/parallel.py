"""Layers whose weights lie with several ranks. Each gives every rank the whole result, with the same bits.

    row-parallel         each rank multiplies its share of the inputs; the sum over the ranks is the product
    vocabulary           each rank looks up, or scores, its own range of token ids

Column-parallel projections need no layer of their own: a rank computes its share of the outputs, and the
next row-parallel projection takes exactly that share as its inputs.
"""

from dataclasses import dataclass

from torch import Tensor

from tandem_engine.model.layers.embedding import Table
from tandem_engine.model.layers.linear import Projection
from tandem_engine.parallel.group import TpGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class RowParallel:
    """Implements `Projection`: [T, in / size] of each rank to [T, out]."""

    local: Projection
    """With the bias on rank 0 alone, so that it is added once."""
    group: TpGroup

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.local(x))


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyEmbedding:
    """Looks up token ids of which this rank holds a range."""

    table: Table
    """[vocab share, hidden]"""
    start: int
    """Token id of the first row."""
    group: TpGroup
    scale: Tensor | None = None
    """As in `Embedding`."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] int64 to a fresh [T, hidden]. Exact: all but one rank contribute zero to each row."""
        local = token_ids - self.start
        elsewhere = (local < 0) | (local >= len(self.table))
        rows = self.table(local.masked_fill_(elsewhere, 0))
        self.group.all_reduce(rows.masked_fill_(elsewhere[:, None], 0.0))
        return rows if self.scale is None else rows.mul_(self.scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyHead:
    """Implements `Projection`: hidden states [N, hidden] to logits [N, vocab], from each rank's range."""

    local: Projection
    """To [N, vocab share]."""
    vocab_size: int
    """The padding behind it is cut off."""
    group: TpGroup

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.all_gather(self.local(x))[:, : self.vocab_size].contiguous()
