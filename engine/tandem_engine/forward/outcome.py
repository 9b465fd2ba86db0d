"""What a step has found out, before the host has it.

    where the step runs     outcome.tensors are queued to be copied
    on the host, later      outcome.read(copies) is the answer

Between the two the host goes on: nobody waits for the device to learn a step's results but whoever settles it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

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
