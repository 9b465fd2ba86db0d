"""What is done to the heads of q and k between their projection and attention. A value; needs no Triton."""

from typing import NamedTuple

from torch import Tensor


class HeadNorm(NamedTuple):
    """The norm of q's and k's heads before their rotation."""

    weight: Tensor
    """[H + KV, D], q's heads first; float32 when it is to be applied before rounding."""
    eps: float


class HeadTurn(NamedTuple):
    """How heads are normalised, if they are, and rotated."""

    cos: Tensor
    """[T, R], dense but for the first dimension, for R ≤ D dimensions of a head."""
    signed_sin: Tensor
    """[T, R], as far apart as `cos`; −sin in its first half."""
    norm: HeadNorm | None
