"""What to make of a prompt's hidden states when the answer is a vector instead of text."""

from enum import StrEnum

import msgspec

from tandem_engine.errors import InvalidRequestError


class Pooling(StrEnum):
    """Which tokens' hidden states, after the final norm, become the embedding."""

    LAST = "last"
    """The last token's, which alone has seen the whole prompt."""
    MEAN = "mean"
    """The mean over all tokens."""
    CLS = "cls"
    """The first token's. In a causal model it has seen nothing else."""


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One embedding. Dimensions are cut before the vector is normalised, as Matryoshka models are trained for."""

    pooling: Pooling = Pooling.LAST
    normalize: bool = True
    """Scale to length 1."""
    dimensions: int | None = None
    """Leading entries to keep; None for all."""

    def check(self, *, hidden_size: int) -> None:
        """Raise `InvalidRequestError` for what a model of `hidden_size` cannot give; 0 is one that gives none."""
        if not hidden_size:
            raise InvalidRequestError("this engine's model has no hidden states to pool", param="pooling")
        if self.dimensions is not None and not 1 <= self.dimensions <= hidden_size:
            raise InvalidRequestError(
                f"dimensions must be between 1 and {hidden_size}, the size of this model's embeddings, "
                f"got {self.dimensions}",
                param="dimensions",
            )
