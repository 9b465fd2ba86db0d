"""From tensors of a checkpoint to layers, whole or shared by several ranks.

With one rank every function gives the plain layer: sharing costs nothing where there is none.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import ModelConfig, ModelImpl
from tandem_engine.memory.cache_groups import KvRow
from tandem_engine.model.layers.linear import (
    Embedding,
    Projection,
    RowParallel,
    ScaledProjection,
    TokenEmbedding,
    VocabularyEmbedding,
    VocabularyHead,
    projection,
    quantized_projection,
    table_of,
)
from tandem_engine.model.quantization.levels import Levels
from tandem_engine.parallel.group import TpGroup
from tandem_engine.parallel.sharding import Split, share_of


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

    def exact(self, name: str) -> Tensor:
        """One whole tensor in float32, whatever the model's dtype."""
        ...

    def matrix(self, *names: str, split: Split | None = None, rounded: bool = True) -> Tensor | Levels:
        """As `stacked`, for a projection: quantized if it is to be held so and there is a kernel for it.

        `rounded`: whether a plain one may be rounded, if that is how projections are to be held.
        """
        ...


def held_projection(matrix: Tensor | Levels, bias: Tensor | None, dtype: torch.dtype) -> Projection:
    """x Wᵀ + b by a matrix as `Weights.matrix` gives it, for a model of `dtype`."""
    return quantized_projection(matrix, bias, dtype) if isinstance(matrix, Levels) else projection(matrix, bias)


def column_parallel(weights: Weights, *names: str, bias: bool, split: Split, order: Tensor | None = None) -> Projection:
    """The named projections as one; each rank computes its share of the outputs of each.

    `order`: int64, which of this rank's stacked outputs stands at each place; None as they are.
    """
    matrix = weights.matrix(*(f"{name}.weight" for name in names), split=split)
    biases = weights.stacked(*(f"{name}.bias" for name in names), split=split) if bias else None
    if order is not None:
        order = order.to(weights.device)
        matrix = matrix.outputs(order) if isinstance(matrix, Levels) else matrix.index_select(0, order)
        biases = None if biases is None else biases.index_select(0, order)
    return held_projection(matrix, biases, weights.dtype)


def replicated(weights: Weights, *names: str, bias: bool) -> Projection:
    """The named projections as one, whose outputs every rank computes."""
    return held_projection(
        weights.matrix(*(f"{name}.weight" for name in names)),
        weights.stacked(*(f"{name}.bias" for name in names)) if bias else None,
        weights.dtype,
    )


def row_parallel(weights: Weights, name: str, *, bias: bool, split: Split, scale: float = 1.0) -> Projection:
    """The named projection, from a share of its inputs on each rank to all of its outputs on every rank.

    `scale`: factor of the outputs.
    """
    adds_bias = bias and weights.group.rank == 0
    local = held_projection(
        weights.matrix(f"{name}.weight", split=split),
        weights.stacked(f"{name}.bias") if adds_bias else None,
        weights.dtype,
    )
    whole = local if weights.group.size == 1 else RowParallel(local=local, group=weights.group)
    return whole if scale == 1.0 else ScaledProjection(projection=whole, factor=scale)


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


class Heads(NamedTuple):
    """Attention heads that one rank computes."""

    query: int
    kv: int
    """With fewer KV heads than ranks, neighbouring ranks hold the same one."""


def heads_of_rank(config: ModelConfig, size: int) -> Heads:
    """Heads of each of `size` ranks, of a model that `require_shareable` has accepted."""
    query, kv = share_of(config.num_heads, size), share_of(config.num_kv_heads, size)
    assert query is not None, f"{config.num_heads} heads on {size} ranks"
    assert kv is not None, f"{config.num_kv_heads} KV heads on {size} ranks"
    return Heads(query=query, kv=kv)


def kv_rows(config: ModelConfig, size: int) -> tuple[KvRow, ...]:
    """What each layer with pages keeps of a token, on each of `size` ranks."""
    layers = map(config.of_layer, config.paged_layers)
    return tuple(KvRow(heads=heads_of_rank(own, size).kv, width=own.head_dim) for own in layers)


def can_share(config: ModelConfig, size: int) -> bool:
    """Whether `size` ranks can share the model evenly."""
    return _obstacle(config, size) is None


def require_shareable(config: ModelConfig, size: int) -> None:
    """Raise `ConfigError`, naming the sizes that work, when `size` ranks cannot share the model evenly."""
    obstacle = _obstacle(config, size)
    if obstacle is not None:
        possible = ", ".join(str(n) for n in range(1, config.num_heads + 1) if can_share(config, n))
        raise ConfigError(f"--tensor-parallel-size {size} does not fit this model: {obstacle}; it can be {possible}")


def _obstacle(config: ModelConfig, size: int) -> str | None:
    if size > 1 and config.impl is ModelImpl.TRANSFORMERS:
        return "code of transformers computes it, which cannot be shared"
    if config.num_heads % size:
        return f"it does not divide the {config.num_heads} attention heads"
    if share_of(config.num_kv_heads, size) is None:
        return f"it is not a divisor or a multiple of the {config.num_kv_heads} KV heads"
    if config.varied is not None and share_of(config.varied.wide_kv_heads, size) is None:
        return f"it is not a divisor or a multiple of the {config.varied.wide_kv_heads} KV heads of full layers"
    if config.delta is not None and config.delta.key_heads % size:
        return f"it does not divide the {config.delta.key_heads} key heads of layers with states"
    odd = next((inner for inner in _inner_sizes(config) if inner % size), None)
    return None if odd is None else f"it does not divide the intermediate size of {odd}"


def _inner_sizes(config: ModelConfig) -> Iterator[int]:
    """Of the feed-forward blocks and experts that the model has."""
    if config.moe is None or config.moe.dense_layers or config.moe.beside:
        yield config.intermediate_size
    if config.varied is not None and config.varied.readers:
        yield config.varied.reader_intermediate_size
    if config.moe is not None:
        yield config.moe.intermediate_size
        if config.moe.shared is not None:
            yield config.moe.shared.intermediate_size
