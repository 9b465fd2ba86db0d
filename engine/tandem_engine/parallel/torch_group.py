"""Groups by torch.distributed: gloo between CPU ranks, NCCL between GPU ranks.

Process groups are made directly and not through `init_process_group`, which would keep them in globals of the
process: an engine owns its groups, and a process may hold ranks of several engines, or several ranks of one.

All ranks run on one machine. Gloo is bound to the loopback device and the store is a file that only this user
can read, so nothing of a group can be reached from outside (RELIABILITY: unauthenticated side channels).
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from tandem_engine.errors import ConfigError, RankLostError
from tandem_engine.parallel.failure import FirstFailure
from tandem_engine.parallel.group import Parallel

LOOPBACK = "127.0.0.1"
NO_TIMEOUT_S = 365 * 24 * 3600.0
"""An engine may have nothing to do for days; the scheduler's ranks notice each other's end by their connections."""


class Collectives(Protocol):
    """What torch's process groups have in common. Each call starts a collective, and `Work.wait` completes it."""

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions = ..., /) -> dist.Work: ...

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions, /) -> dist.Work: ...

    def _allgather_base(self, output: Tensor, tensor: Tensor, /) -> dist.Work: ...


class TorchGroup:
    """Implements `TpGroup` over one torch process group.

    Args:
        collectives: a `ProcessGroupGloo` or `ProcessGroupNCCL` that nobody else uses.
    """

    def __init__(self, collectives: Collectives, *, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._collectives: Collectives | None = collectives
        self._minimum = dist.AllreduceOptions()
        self._minimum.reduceOp = cast("dist.ReduceOp", dist.ReduceOp.MIN)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if tensor.numel():
            self._complete(lambda group: group.allreduce([tensor]))
        return tensor

    def least(self, tensor: Tensor) -> Tensor:
        self._complete(lambda group: group.allreduce([tensor], self._minimum))
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        rows, width = tensor.shape
        gathered = tensor.new_empty((self.size * rows, width))
        if rows:
            self._complete(lambda group: group._allgather_base(gathered, tensor))
        return gathered.view(self.size, rows, width).transpose(0, 1).reshape(rows, self.size * width)

    def broadcast(self, tensor: Tensor) -> Tensor:
        self._complete(lambda group: group.broadcast([tensor], dist.BroadcastOptions()))
        return tensor

    def close(self) -> None:
        self._collectives = None

    def _complete(self, start: Callable[[Collectives], dist.Work]) -> None:
        assert self._collectives is not None, "a collective on a group that was left"
        try:
            start(self._collectives).wait()
        except RuntimeError as error:
            # Torch has no narrower type for a peer that closed its connection, or never came.
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RankLostError(f"rank {self.rank} of {self.size} failed to exchange data: {first_line}") from error


def join_ranks(
    store: Store,
    *,
    rank: int,
    size: int,
    device: torch.device,
    timeout_s: float,
    failure: FirstFailure | None = None,
) -> Parallel:
    """Meet the other ranks and form both groups. Blocks until all have come.

    Args:
        store: shared by all ranks, and by no other engine.
        timeout_s: how long a rank waits for the others, here and in each collective of a forward.
        failure: where this rank's first failure is recorded; None makes a new one.

    Raises:
        ConfigError: there is no backend for `device`.
        RankLostError: another rank did not come in time.
    """
    try:
        return Parallel(
            forward=_group(store, "forward", rank=rank, size=size, device=device, timeout_s=timeout_s),
            # The scheduler agrees on things that the host knows, whatever computes the forward.
            schedule=_group(
                store, "schedule", rank=rank, size=size, device=torch.device("cpu"), timeout_s=NO_TIMEOUT_S
            ),
            failure=failure or FirstFailure(),
        )
    except RuntimeError as error:
        raise RankLostError(f"rank {rank} of {size} did not meet the others: {error}") from error


def _group(store: Store, name: str, *, rank: int, size: int, device: torch.device, timeout_s: float) -> TorchGroup:
    store = PrefixStore(name, store)
    timeout = timedelta(seconds=timeout_s)
    match device.type:
        case "cpu":
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
            gloo._timeout = timeout
            return TorchGroup(_collectives(dist.ProcessGroupGloo(store, rank, size, gloo)), rank=rank, size=size)
        case "cuda":
            if not dist.is_nccl_available():
                raise ConfigError("--tensor-parallel-size above 1 on --device cuda needs a build of torch with NCCL")
            torch.cuda.set_device(device)
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            return TorchGroup(_collectives(dist.ProcessGroupNCCL(store, rank, size, nccl)), rank=rank, size=size)
    raise ConfigError(f"--tensor-parallel-size above 1 works on --device cpu and cuda, got {device.type}")


def _collectives(process_group: object) -> Collectives:
    """Torch's stubs do not know the methods of its process groups, and a build without NCCL not even the class."""
    return cast("Collectives", process_group)
