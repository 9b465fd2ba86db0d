"""A small model of the same vocabulary as drafter.

It runs as the target does, through a `ModelRunner` over a pool of its own, so every family that can be served
can draft. It samples with the noise of the target's positions, which makes it agree more often than a model
that guessed what is likely (see `speculative.verify`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tandem_engine.forward.forward_batch import ForwardBatch, ForwardResult
from tandem_engine.speculative.model_proposer import Guess


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Implements `DraftNetwork`."""

    compute: Callable[[ForwardBatch], ForwardResult]
    """Of a `ModelRunner`."""

    def extend(self, batch: ForwardBatch) -> Guess:
        """See `DraftNetwork.extend`."""
        return Guess(token_ids=self.compute(batch).next_token_ids)

    def step(self, batch: ForwardBatch, state: Tensor | None) -> Guess:
        """See `DraftNetwork.step`; a model knows all from its KV."""
        assert state is None, "a draft model carries no state from guess to guess"
        return self.extend(batch)
