"""The ranks of one engine, as the code that computes on them sees them.

A group belongs to one thread of each rank: collectives are matched by their order alone, so two threads that
share a group would meet each other's. `Parallel` therefore has one for the forward thread and one for the
scheduler thread. An engine that is alone has `SingleRank` in both places, and pays a method call.
"""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from tandem_engine.parallel.failure import Departure, FirstFailure


class TpGroup(Protocol):
    """Collectives over all ranks. Every rank makes the same calls in the same order [same-collectives].

    Tensors are contiguous, and of the same shape and dtype on all ranks.

    Raises:
        RankLostError: from any collective, when another rank has ended or does not come within the timeout.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def can_meet_again(self) -> bool:
        """Whether a rank that leaves frees those that wait for it, so that all can meet again."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place; the same bits on all of them. Returns `tensor`, which may be empty."""
        ...

    def least(self, tensor: Tensor) -> Tensor:
        """Minimum over the ranks, in place. Returns `tensor`."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[N, W] of each rank side by side, in order of rank: [N, size * W]."""
        ...

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` with rank 0's. Returns it."""
        ...

    def leave(self) -> None:
        """Break off: collectives that others wait in for this rank raise. Idempotent; waits for nobody."""
        ...

    def meet_again(self) -> None:
        """After `leave`: form the group anew, with all ranks, each of which left it. Otherwise nothing happens."""
        ...


@dataclass(frozen=True, slots=True)
class SingleRank:
    """Implements `TpGroup` for an engine that is alone: nothing to do, nothing copied."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def least(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor

    @property
    def can_meet_again(self) -> bool:
        return True

    def leave(self) -> None:
        """Nobody to leave."""

    def meet_again(self) -> None:
        """Nobody to meet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """One rank's place among the ranks of its engine."""

    forward: TpGroup = field(default_factory=SingleRank)
    """For the thread that runs forwards."""
    schedule: TpGroup = field(default_factory=SingleRank)
    """For the scheduler thread, which uses it in `agree` alone."""
    failure: FirstFailure = field(default_factory=FirstFailure)
    """What makes this rank unable to go on, once something does."""
    departure: Departure = field(default_factory=Departure)
    """What should end this engine in order, once something does."""

    @property
    def rank(self) -> int:
        return self.forward.rank

    @property
    def size(self) -> int:
        return self.forward.size

    def close(self) -> None:
        """Leave both groups. Idempotent."""
        self.forward.leave()
        self.schedule.leave()
