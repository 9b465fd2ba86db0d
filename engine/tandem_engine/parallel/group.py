"""The ranks of one engine: their groups, work that all of them do together, and what they make equal.

A group belongs to one thread of each rank: collectives are matched by their order alone, so two threads that share a
group would receive each other's. `Parallel` therefore has one group for the forward thread and one for the scheduler
thread. An engine with one rank has `SingleRank` in both places, and pays a method call.

`JointWork` succeeds on all ranks or on none. One piece of work is
    1. begun       at the same place in the order of all joint work on every rank
    2. computed    with the same collectives on every rank
    3. confirmed   by one more collective: when it returns, all ranks have come this far
       given up    a rank raised: it leaves the group. That closes the connections on which others wait for it, so they
                   raise too, and leave as well
    4. rejoined    before the next piece of work all ranks form the group again

So an exception on one rank raises on every rank, at the same place in their order, and the schedulers handle it in the
same way: the requests of a failed step are tried apart, as with one rank. A rank that does not rejoin is lost, and the
engine with it. Where the backend cannot interrupt waiting ranks, an exception on one rank ends the engine, and nothing
is confirmed.

`agree_on_step` makes the results of a forward equal. Every rank computes the same logits and draws by the same noise,
so tokens are equal unless a kernel is not deterministic. Ranks that continued with different tokens would eventually
plan different batches and wait for each other forever, so rank 0's tokens count [rank-zero-tokens]. So does its time:
schedulers derive rates from it, and plan by them.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from tandem_engine.base.errors import ConfigError, OtherRankFailedError, RankLostError


@dataclass(kw_only=True, slots=True)
class FirstFailure:
    """Written by the forward thread and by the watcher of other ranks, read by the scheduler thread."""

    error: RankLostError | None = None

    def record(self, error: Exception) -> None:
        """Remember `error`, unless there was one before."""
        if self.error is None:
            self.error = error if isinstance(error, RankLostError) else _step_failed(error)

    def raise_if_any(self) -> None:
        """Raise the `RankLostError` that was recorded, if one was."""
        if self.error is not None:
            raise self.error


@dataclass(kw_only=True, slots=True)
class Departure:
    """Set by the watcher of other nodes, read by the scheduler thread."""

    reason: str | None = None
    """Why the engine should drain; None while nothing asks for it."""

    def ask(self, reason: str) -> None:
        """Remember `reason`, unless there was one before."""
        self.reason = self.reason or reason


def _step_failed(cause: Exception) -> RankLostError:
    error = RankLostError(
        f"a model step raised {type(cause).__name__} ({cause}); the ranks of an engine cannot continue separately"
    )
    error.__cause__ = cause
    return error


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
        """Break off: collectives that others wait in for this rank raise. Idempotent; does not wait."""
        ...

    def meet_again(self) -> None:
        """After `leave`: form the group again, with all ranks, each of which left it. Otherwise nothing happens."""
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
        """There is no other rank to leave."""

    def meet_again(self) -> None:
        """There is no other rank to rejoin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """One rank's place among the ranks of its engine."""

    forward: TpGroup = field(default_factory=SingleRank)
    """For the thread that runs forwards."""
    schedule: TpGroup = field(default_factory=SingleRank)
    """For the scheduler thread, which uses it in `agree` alone."""
    failure: FirstFailure = field(default_factory=FirstFailure)
    """The failure that keeps this rank from continuing, if any."""
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


def device_of_rank(device: str, rank: int) -> str:
    """`cpu` for all ranks; of GPUs each rank of a node has its own, from the one that is named, or the first, upwards.

    `rank` is counted on its node. Negated it leads from the device of a rank back to that of the node's first.
    """
    named = torch.device(device)
    return device if named.type == "cpu" else f"{named.type}:{(named.index or 0) + rank}"


def require_device(device: str, *, ranks: int = 1) -> None:
    """Raise `ConfigError` unless `device`, as `--device` takes it, and those of the other ranks can compute here."""
    if device == "cpu":
        return
    if torch.version.cuda is None:
        raise ConfigError(
            f"--device {device} needs a build of torch with CUDA, and this is {torch.__version__}: install one "
            "(TANDEM_TORCH=cuda make up), or serve with --device cpu"
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            f"--device {device}: this process sees no GPU (nvidia-smi lists those of the machine, CUDA_VISIBLE_DEVICES "
            "those of a process); serve with --device cpu"
        )
    last, count = torch.device(device_of_rank(device, ranks - 1)).index or 0, torch.cuda.device_count()
    if last >= count:
        wanted = f"--device {device}" if ranks == 1 else f"--device {device} with {ranks} ranks on this machine"
        raise ConfigError(f"{wanted} needs GPU {last}, and this process sees {count}, numbered from 0")


def use_device(device: str | torch.device) -> None:
    """Have what the calling thread launches run on `device`.

    CUDA keeps that for each thread, and a new thread has the first GPU. Kernels would be launched there whatever GPU
    their tensors are on, and a thread that has no GPU yet has no context in which UCX could copy.
    """
    named = torch.device(device)
    if named.type == "cuda":
        torch.cuda.set_device(named.index or 0)


logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class JointWork:
    """One rank's end. Belongs to the thread that `group` belongs to."""

    group: TpGroup
    failure: FirstFailure

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns, once it has returned on all ranks.

        Raises:
            OtherRankFailedError: it did not return on another rank.
            RankLostError: a rank is gone, or did not come to form the group again.
            Exception: what `work` raised here.
        """
        if self.group.size == 1:
            return work()
        self._meet()
        try:
            result = work()
            if self.group.can_meet_again:
                self.group.least(torch.zeros(1, dtype=torch.int64))
        except RankLostError as error:
            self._give_up(error)
            raise OtherRankFailedError(f"another rank did not complete this step: {error}") from error
        except Exception as error:
            logger.warning("rank %d abandons a step: %s: %s", self.group.rank, type(error).__name__, error)
            self._give_up(error)
            raise
        return result

    def _meet(self) -> None:
        try:
            self.group.meet_again()
        except RankLostError as error:
            self.failure.record(error)
            raise

    def _give_up(self, error: Exception) -> None:
        if self.group.can_meet_again:
            self.group.leave()
        else:
            # The ranks that wait inside it cannot be freed.
            self.failure.record(error)


class StepFacts(NamedTuple):
    """Of one step."""

    token_ids: Tensor
    """[S] int64"""
    compute_s: float


def agree_on_step(group: TpGroup, token_ids: Tensor, compute_s: float) -> StepFacts:
    """Rank 0's tokens [S] int64 and seconds. Forward thread only, once in every step of every rank."""
    if group.size == 1:
        return StepFacts(token_ids, compute_s)
    nanoseconds = torch.tensor([int(compute_s * 1e9)], dtype=torch.int64, device=token_ids.device)
    facts = group.broadcast(torch.cat((token_ids, nanoseconds)))
    return StepFacts(facts[:-1], int(facts[-1]) / 1e9)
