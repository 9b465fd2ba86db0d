"""What one layer's attention computes. The model says it per layer; a backend is built for it.

    softmax(cap(q·Kᵀ · scale)) · V   over the newest `window` tokens

where cap(s) = soft_cap · tanh(s / soft_cap).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """One layer. Equal specs are equal work, so a backend plans a step once per distinct spec."""

    scale: float
    """Factor of the scores, usually 1 / √head_dim."""
    window: int | None = None
    """Newest tokens that a token sees, itself included; None is all of them."""
    soft_cap: float | None = None
    """Bound that scores approach smoothly (Gemma 2); None leaves them alone."""

    def first_seen(self, position: int) -> int:
        """The oldest position that the token at `position` sees."""
        return 0 if self.window is None else max(position + 1 - self.window, 0)


def distinct(specs: Sequence[AttentionSpec]) -> tuple[tuple[AttentionSpec, ...], tuple[int, ...]]:
    """The different ones among the layers' specs, and for each layer the index of its own."""
    kinds = tuple(dict.fromkeys(specs))
    return kinds, tuple(kinds.index(spec) for spec in specs)
