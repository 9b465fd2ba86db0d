"""A draft head in the manner of EAGLE: one block that continues the target's own thoughts.

    token at position i      ─▶ target's embedding ─┐
    hidden state of i − 1    ───────────────────────┴▶ fc ▶ block ▶ norm ─▶ hidden state of i, as guessed
                                                                     └▶ target's head ▶ token i + 1, as guessed

The hidden state of i − 1 is the target's where it is known, that is for settled text, and the head's own for
guesses. It tells what the target was about to say, the embedding which way it went. The head has its own
attention, over a pool of one layer that shares the page ids of the target's, and the target's embedding and
output matrix.

The pair for token i is kept at slot i, so draft KV is a function of the same tokens as KV is. EAGLE numbers
the pair by the hidden state, which makes it depend on one token more, and every length differ by one between
the two pools [one-length-unit].
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tandem_engine.attention.spec import AttentionSpec
from tandem_engine.config import ModelConfig
from tandem_engine.forward.forward_batch import ForwardBatch
from tandem_engine.model.base import Attend, DraftHead
from tandem_engine.model.decoder import Block, attention_specs
from tandem_engine.model.layers.linear import Projection
from tandem_engine.model.layers.norm import Norm
from tandem_engine.model.layers.rotary import RotaryTable
from tandem_engine.speculative.hidden_states import HiddenStates


class EagleTarget(Protocol):
    """What a head shares with the model it drafts for."""

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T] to [T, hidden_size]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size], past the final norm, to float32 [N, vocab_size]."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleHead:
    """The weights."""

    fc: Projection
    """[T, 2 * hidden_size] to [T, hidden_size]."""
    block: Block
    norm: Norm
    rotary: RotaryTable

    def forward(self, embedded: Tensor, before: Tensor, positions: Tensor, attend: Attend, wanted: Tensor) -> Tensor:
        """Guessed hidden states [S, hidden_size] of the tokens `wanted` [S].

        Args:
            embedded: [T, hidden_size]; before: [T, hidden_size], the state before each token.
            positions: [T] int64.
        """
        hidden = self.fc(torch.cat((embedded, before), dim=1))
        block = self.block
        gathered = block.attention.attend(0, block.attention.norm(hidden), self.rotary.at(positions), attend)
        hidden, gathered = hidden.index_select(0, wanted), gathered.index_select(0, wanted)
        normed = block.feed_forward.norm.of_sum(hidden, block.attention.project(gathered))
        return self.norm.of_sum(hidden, block.feed_forward(normed))


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleModel(DraftHead):
    """A head with what it shares: a model to runners."""

    facts: ModelConfig
    head: EagleHead
    target: EagleTarget
    states: HiddenStates

    @property
    def config(self) -> ModelConfig:
        return self.facts

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """See `CausalLM.attention`."""
        return attention_specs(self.facts)

    def forward(self, batch: ForwardBatch, input_ids: Tensor, attend: Attend, wanted: Tensor) -> Tensor:
        """See `DraftHead.forward`."""
        embedded, before = self.target.embed(input_ids), self.states.before(batch)
        return self.head.forward(embedded, before, batch.positions, attend, wanted)

    def keep(self, hidden: Tensor, slots: Tensor) -> None:
        """See `DraftHead.keep`: where the target's states will be, once it has computed these tokens."""
        self.states.observe(hidden, slots)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        return self.target.logits(hidden)
