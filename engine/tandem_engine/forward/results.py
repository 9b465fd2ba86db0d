"""Results of a step before the host has them.

    where the step runs     outcome.tensors are queued to be copied
    on the host, later      outcome.read(copies) is the result

In between the host continues: only the settlement of a step waits for its results.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """Tensors of the device, and what they mean."""

    tensors: tuple[Tensor, ...]
    read: Callable[[Sequence[Tensor]], T]
    """From copies of `tensors` on the host, in their order."""


def nothing(value: T) -> Outcome[T]:
    """What needs no tensor to be known."""
    return Outcome((), lambda _: value)


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledTokens:
    """Tokens of one sequence whose hidden states are wanted and which this step computes."""

    sequence: int
    """Index into the step's sequences."""
    first: int
    """Position of the first of them; the others follow it."""
    tokens: torch.Tensor
    """[N] int64 indices into the step's tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledSum:
    """Answers a `PooledTokens`, whose `sequence` and `first` it repeats."""

    sequence: int
    first: int
    count: int
    total: torch.Tensor
    """[hidden_size] float64 sum over the tokens: so wide that where a prompt is cut does not show."""


def sum_pooled(hidden: torch.Tensor, wanted: tuple[PooledTokens, ...]) -> tuple[PooledSum, ...]:
    """Sums of hidden [ΣN, hidden_size] of the tokens that `wanted` names, in that order."""
    if not wanted:
        return ()
    parts = torch.split(hidden, [len(pooled.tokens) for pooled in wanted])
    return tuple(
        PooledSum(sequence=pooled.sequence, first=pooled.first, count=len(rows), total=rows.double().sum(dim=0).cpu())
        for pooled, rows in zip(wanted, parts, strict=True)
    )


def queue_pooled(hidden: torch.Tensor, wanted: tuple[PooledTokens, ...]) -> Outcome[tuple[PooledSum, ...]]:
    """As `sum_pooled`, without waiting for the sums."""
    parts = torch.split(hidden, [len(pooled.tokens) for pooled in wanted]) if wanted else ()

    def read(totals: Sequence[torch.Tensor]) -> tuple[PooledSum, ...]:
        return tuple(
            PooledSum(sequence=pooled.sequence, first=pooled.first, count=len(pooled.tokens), total=total.clone())
            for pooled, total in zip(wanted, totals, strict=True)
        )

    return Outcome(tuple(rows.double().sum(dim=0) for rows in parts), read)
