"""The executor's interface to a model: one forward over a flat run of tokens, with attention passed in.

Shapes use  T = tokens computed in this step, S = tokens whose hidden states are wanted, H = query heads,
KV = key/value heads, D = head_dim. The model holds only weights. Where keys and values are stored, which tokens belong
together and what each may see is defined by the `Attend` that it is called with.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from torch import Tensor

from tandem_engine.config import ModelConfig
from tandem_engine.forward.batch import ForwardBatch
from tandem_engine.memory.cache_groups import KvRow, KvSpec, Reach
from tandem_engine.model.adapters.step import StepAdapters
from tandem_engine.model.attention.backend import Attend, AttentionSpec


class CausalLM(Protocol):
    """A decoder with its weights on one device. Immutable, so any thread may call it."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """What each layer with pages asks of `Attend`, which counts those; a backend is built for it."""
        ...

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        wanted: Tensor,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """Compute one step up to the final norm. The caller holds `torch.inference_mode`.

        Args:
            input_ids: [T] int64, each within the vocabulary.
            positions: [T] int64, absolute position of each token in its sequence.
            attend: called once per layer, in layer order.
            wanted: [S] int64, indices into T of the tokens whose hidden states are needed; S may be 0.
            adapters: what changes the products of some tokens; None where no token has an adapter.

        Returns:
            Hidden states [S, hidden_size] of those tokens, in that order, in the model's dtype.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, hidden_size] that `forward` returned, to float32 logits [N, vocab_size].

        Apart from `forward` because a long prompt's logits must be taken a part at a time [logits-in-parts], and
        because pooling and drafting want hidden states and no logits.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerInputs:
    """What some layers of a forward read: the hidden states before their norms."""

    layers: tuple[int, ...]
    """Ascending. The number of layers stands for what the last one returns."""
    found: list[Tensor] = field(default_factory=list)
    """[T, hidden_size] of each, in their order."""

    def note(self, layer: int, hidden: Tensor) -> None:
        """Keep a copy of `hidden`, the input of `layer`, if it is one of these."""
        if layer in self.layers:
            self.found.append(hidden.clone())


class DraftHead(ABC):
    """Continues from the hidden states of another model. Runs where a `CausalLM` does, on its own pool."""

    __slots__ = ()

    @property
    @abstractmethod
    def config(self) -> ModelConfig: ...

    @property
    @abstractmethod
    def attention(self) -> tuple[AttentionSpec, ...]:
        """See `CausalLM.attention`."""

    @abstractmethod
    def forward(self, batch: ForwardBatch, input_ids: Tensor, attend: Attend, wanted: Tensor) -> Tensor:
        """As `CausalLM.forward`, of `batch` with its `input_ids` resolved: from its slots follow the states before."""

    @abstractmethod
    def keep(self, hidden: Tensor, slots: Tensor) -> None:
        """Remember hidden states [S, hidden_size] of the tokens in `slots` [S], for guesses that continue from them."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""


StepModel: TypeAlias = CausalLM | DraftHead
"""What a runner computes steps with."""


def kv_specs(model: StepModel, rows: Sequence[KvRow]) -> tuple[KvSpec, ...]:
    """What each layer with pages remembers, on a rank where it keeps `rows`."""
    return tuple(
        KvSpec(reach=Reach(spec.window, spec.chunk), row=row, value_width=spec.value_width)
        for spec, row in zip(model.attention, rows, strict=True)
    )
