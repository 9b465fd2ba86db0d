"""From tensors of a checkpoint to layers, whole or shared by several ranks.

With one rank every function gives the plain layer: sharing costs nothing where there is none.
"""

from typing import Protocol

import torch
from torch import Tensor

from tandem_engine.model.layers.embedding import Embedding, TokenEmbedding, table_of
from tandem_engine.model.layers.linear import Projection, projection
from tandem_engine.model.layers.parallel import RowParallel, VocabularyEmbedding, VocabularyHead
from tandem_engine.model.layers.quantized import quantized_projection
from tandem_engine.model.quantization.levels import Levels
from tandem_engine.parallel.group import TpGroup
from tandem_engine.parallel.split import Split


class MatrixReader(Protocol):
    """`Weights.matrix`, or `Weights.stacked`."""

    def __call__(self, *names: str, split: Split | None = None) -> Tensor | Levels: ...


class Weights(Protocol):
    """Where the tensors of a model come from. Asked once for each."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def group(self) -> TpGroup:
        """The ranks that share the model."""
        ...

    def stacked(self, *names: str, split: Split | None = None) -> Tensor:
        """The tensors of a checkpoint concatenated along dimension 0, in the model's dtype and place.

        With `split` only this rank's part of each; without it all ranks hold the whole.
        """
        ...

    def matrix(self, *names: str, split: Split | None = None, rounded: bool = True) -> Tensor | Levels:
        """As `stacked`, for a projection: quantized if it is to be held so and there is a kernel for it.

        `rounded`: whether a plain one may be rounded, if that is how projections are to be held.
        """
        ...


def held_projection(matrix: Tensor | Levels, bias: Tensor | None, dtype: torch.dtype) -> Projection:
    """x Wᵀ + b by a matrix as `Weights.matrix` gives it, for a model of `dtype`."""
    return quantized_projection(matrix, bias, dtype) if isinstance(matrix, Levels) else projection(matrix, bias)


def column_parallel(weights: Weights, *names: str, bias: bool, split: Split) -> Projection:
    """The named projections as one; each rank computes its share of the outputs of each."""
    return held_projection(
        weights.matrix(*(f"{name}.weight" for name in names), split=split),
        weights.stacked(*(f"{name}.bias" for name in names), split=split) if bias else None,
        weights.dtype,
    )


def row_parallel(weights: Weights, name: str, *, bias: bool, split: Split) -> Projection:
    """The named projection, from a share of its inputs on each rank to all of its outputs on every rank."""
    adds_bias = bias and weights.group.rank == 0
    local = held_projection(
        weights.matrix(f"{name}.weight", split=split),
        weights.stacked(f"{name}.bias") if adds_bias else None,
        weights.dtype,
    )
    return local if weights.group.size == 1 else RowParallel(local=local, group=weights.group)


def token_embedding(
    weight: Tensor, group: TpGroup, *, scores: Projection | None = None, scale: float = 1.0
) -> TokenEmbedding:
    """`weight`: this rank's part [vocab share, hidden] of the table; `scores`: the projection by the same weight, if
    there is one; `scale`: factor of the rows."""
    factor = None if scale == 1.0 else torch.tensor(scale, dtype=weight.dtype, device=weight.device)
    table = table_of(weight, scores)
    if group.size == 1:
        return Embedding(table=table, scale=factor)
    return VocabularyEmbedding(table=table, start=group.rank * len(weight), group=group, scale=factor)


def head(local: Projection, vocab_size: int, group: TpGroup) -> Projection:
    """`local`: hidden states to the logits of this rank's part of the vocabulary."""
    return local if group.size == 1 else VocabularyHead(local=local, vocab_size=vocab_size, group=group)
