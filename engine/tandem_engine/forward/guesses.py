"""Drafts that a device has, and that the host need not know before their step is queued.

    proposal    the steps of a draft network are queued; what they sample stays where it is      `Runner.guess`
    step        the model's step, queued behind them, gets its drafts from there                 `GuessedIds.fill`
    settlement  the host compares the guesses, which have arrived by then, with what was sampled

Whoever needs a guess earlier waits for all of them: penalties and grammars within a run of drafts, and other ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Self, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tandem_engine.forward.forward_batch import ForwardResult

Chains: TypeAlias = tuple[tuple[int, ...], ...]


class Guesses:
    """What the steps of one proposal sample, one step behind the other."""

    def __init__(self, results: "Callable[[], Sequence[ForwardResult]]", *, on_device: Tensor | None = None) -> None:
        """`results`: of the steps, waits for the device. `on_device`: [G] int64; None where steps are computed on the
        host, which knows them."""
        self.on_device = on_device
        self._read: Callable[[], Sequence[ForwardResult]] | None = results
        self._results: Sequence[ForwardResult] = ()

    @property
    def count(self) -> int:
        """G. Waits for nobody."""
        return len(self.tokens()) if self.on_device is None else self.on_device.numel()

    def tokens(self) -> list[int]:
        """[G] on the host. Waits for the device."""
        return [token for result in self._steps() for token in result.next_token_ids]

    def chains(self, indices: Chains) -> Chains:
        """Tokens in the place of `indices` among them. Waits for the device."""
        tokens = self.tokens()
        return tuple(tuple(tokens[index] for index in chain) for chain in indices)

    @property
    def compute_s(self) -> float:
        """Seconds that the device took for them. Waits for it."""
        return sum(result.compute_s for result in self._steps())

    def _steps(self) -> "Sequence[ForwardResult]":
        if self._read is not None:
            # What the steps hold of the device is let go.
            self._results, self._read = self._read(), None
        return self._results


@dataclass(frozen=True, kw_only=True, slots=True)
class GuessedIds:
    """Input ids of a step that are guesses."""

    places: Tensor
    """[N] among the tokens of the step."""
    sources: Tensor
    """[N] among the guesses."""
    guesses: Guesses

    @classmethod
    def of(cls, guesses: Guesses, chains: Chains, *, first: int) -> Self:
        """Of runs that begin at token `first`, each a known token and the guesses of a chain of indices."""
        starts = accumulate((1 + len(chain) for chain in chains), initial=first)
        places = [
            start + 1 + draft for start, chain in zip(starts, chains, strict=False) for draft in range(len(chain))
        ]
        sources = [index for chain in chains for index in chain]
        placed, taken = (torch.tensor(indices, dtype=torch.int64) for indices in (places, sources))
        return cls(places=placed, sources=taken, guesses=guesses)

    def fill(self, input_ids: Tensor) -> None:
        """Write them to `input_ids`, of the device and its copy of this. Queued."""
        guesses = self.guesses.on_device
        assert guesses is not None, "what the host knows is among the input ids from the start"
        input_ids.index_copy_(0, self.places, guesses.index_select(0, self.sources))

    def known(self) -> Iterator[tuple[int, int]]:
        """Place and token of each, from tensors of the host. Waits for the device."""
        tokens = self.guesses.tokens()
        return zip(self.places.tolist(), (tokens[source] for source in self.sources.tolist()), strict=True)
