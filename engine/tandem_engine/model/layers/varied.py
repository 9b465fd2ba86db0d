"""Parts of layers that differ from each other (Gemma 4).

    ReadingAttention   of a layer that keeps no K and V: it reads those of an earlier one
    BesideExperts      experts next to a feed-forward block, each with its own norms
    FurtherInputs        numbers that each layer gets of each token, in addition to the hidden states
    LayerEnd           adds them, and scales what the layer leaves

A layer that reads attends with the K and V of the step as its source has stored them, so it stores them once more, the
same numbers in the same places. `SharingAttend` has them for as long as the step runs.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tandem_engine.kernels.interface import GatedActivation
from tandem_engine.model.attention.backend import Attend
from tandem_engine.model.layers.attention import Rotation
from tandem_engine.model.layers.linear import Delta, Projection, TokenEmbedding
from tandem_engine.model.layers.mlp import Choice, FeedForward, Router
from tandem_engine.model.layers.norm import NoNorm, Norm


@dataclass(frozen=True, kw_only=True, slots=True)
class SharingAttend:
    """An `Attend` that keeps K and V of some layers for those that read them."""

    attend: Attend
    sources: frozenset[int]
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """k and v of the step's tokens by source."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`."""
        if layer in self.sources:
            self.kept[layer] = k, v
        return self.attend(layer, q, k, v)

    def read(self, source: int, q: Tensor) -> Tensor:
        """As a call, of the k and v that layer `source` has stored."""
        return self.attend(source, q, *self.kept[source])


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingAttention:
    """Self-attention over K and V of another layer. Stands where `SelfAttention` stands."""

    norm: Norm
    source: int
    """The layer that keeps K and V."""
    query: Projection
    query_norm: Norm
    """Of each head before its rotation."""
    output: Projection
    output_norm: Norm | None
    head_dim: int

    @property
    def sinks(self) -> None:
        """See `SelfAttention`: there are none."""
        return

    def attend(
        self,
        layer: int,  # noqa: ARG002 - it has its source
        normed: Tensor,
        rotation: Rotation,
        attend: Attend,
        delta: Delta | None = None,
    ) -> Tensor:
        """See `SelfAttention.attend`."""
        assert delta is None, "open_adapter refuses adapters of models whose layers differ"
        assert isinstance(attend, SharingAttend), "a model whose layers share K and V has them kept"
        heads = self.query(normed).view(normed.shape[0], -1, self.head_dim)
        return attend.read(self.source, rotation.apply(self.query_norm(heads)))

    def project(self, gathered: Tensor, delta: Delta | None = None) -> Tensor:
        """See `SelfAttention.project`."""
        assert delta is None, "open_adapter refuses adapters of models whose layers differ"
        out = self.output(gathered)
        return out if self.output_norm is None else self.output_norm(out)


class ChosenExperts(Protocol):
    """`SparseFeedForward`, or `DeviceExperts`."""

    @property
    def norm(self) -> Norm: ...

    @property
    def router(self) -> Router: ...

    def __call__(self, normed: Tensor) -> Tensor:
        """See `FeedForward`."""
        ...

    def chosen(self, normed: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """What chosen experts make of the tokens."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BesideExperts:
    """Experts, and a feed-forward block for every token. Stands where `FeedForward` stands."""

    block: FeedForward
    experts: ChosenExperts
    router_norm: Norm
    """Of what the router reads: the hidden states, like the norms of both blocks."""
    expert_scale: Tensor
    """[E], factors of the weights of experts."""
    experts_norm: Norm
    """Of what experts add."""
    output_norm: Norm
    """Of the sum."""
    norm: Norm = field(default_factory=NoNorm)

    def __call__(self, normed: Tensor) -> Tensor:
        """Hidden states [T, hidden], which `norm` leaves as they are, to what is added to them."""
        experts, weights = self._choice(normed)
        routed = self.experts.chosen(self.experts.norm(normed), experts, weights)
        dense = self.block(self.block.norm(normed))
        return self.output_norm(dense.add_(self.experts_norm(routed)))

    def _choice(self, hidden: Tensor) -> Choice:
        experts, weights = self.experts.router(self.router_norm(hidden))
        return Choice(experts, weights * self.expert_scale[experts])


@dataclass(frozen=True, kw_only=True, slots=True)
class FurtherInputs:
    """Makes the further inputs of all layers: a row of a table by the token, and a projection of its embedding."""

    table: TokenEmbedding
    """[T] to [T, layers * size]"""
    projection: Projection
    """[T, hidden] to [T, layers * size]"""
    scale: float
    """Of what is projected."""
    norm: Norm
    size: int

    def __call__(self, input_ids: Tensor, embedded: Tensor) -> Tensor:
        """[layers, T, size]"""
        shape = (len(input_ids), -1, self.size)
        projected = self.norm((self.projection(embedded) * self.scale).view(shape))
        return projected.add_(self.table(input_ids).view(shape)).mul_(2**-0.5).transpose(0, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class InputBlock:
    """A layer's further inputs to what is added to its hidden states."""

    gate: Projection
    """[T, hidden] to [T, size]"""
    activation: GatedActivation
    projection: Projection
    """[T, size] to [T, hidden]"""
    norm: Norm
    """Of the result."""

    def __call__(self, hidden: Tensor, given: Tensor) -> Tensor:
        """`given`: [T, size]."""
        gated = self.activation(torch.cat((self.gate(hidden), given), dim=-1))
        return self.norm(self.projection(gated))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerEnd:
    """What a layer does with its hidden states at last."""

    block: InputBlock | None
    scale: Tensor
    """[1]"""

    def __call__(self, hidden: Tensor, given: Tensor | None) -> Tensor:
        """`hidden` itself, changed in place."""
        if self.block is not None:
            assert given is not None, "the model has inputs of its layers"
            hidden.add_(self.block(hidden, given))
        return hidden.mul_(self.scale)
