"""Ranks of one engine, each on a simulated device of its own: their collectives are queued, and captured, as NCCL's
are.

A collective is an operation of torch here, so the device sees what it reads and writes, on which stream, and a tape
plays it again: it meets the others' at each replay. Between the ranks, threads of the test, is real gloo. Ranks that
replayed graphs of different sizes, or a different number of them, would exchange tensors that do not fit, or wait for
each other until the collective's time is up.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from tandem_engine.config import EngineConfig, ParallelConfig
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.executor.platform import Platform
from tandem_engine.parallel.group import TpGroup
from tandem_engine.parallel.torch_group import join_ranks
from tandem_lab.verify.engines import ThreadRanks
from tandem_testing.simulated_platform import without_fused_steps
from tandem_testing.torch_operators import resolve_operators

NAMESPACE = "tandem_testing"
TIMEOUT_S = 120.0

_numbers = count()
_groups: dict[int, TpGroup] = {}
_library = torch.library.Library(NAMESPACE, "DEF")
_library.define("all_reduce(Tensor(a!) tensor, int group) -> ()")
_library.define("least(Tensor(a!) tensor, int group) -> ()")
_library.define("broadcast(Tensor(a!) tensor, int group) -> ()")
_library.define("all_gather(Tensor tensor, int group) -> Tensor")


def _in_place(name: str) -> Callable[[Tensor, int], None]:
    def exchange(tensor: Tensor, group: int) -> None:
        getattr(_groups[group], name)(tensor)

    return exchange


for _name in ("all_reduce", "least", "broadcast"):
    _library.impl(_name, _in_place(_name), "CPU")
_library.impl("all_gather", lambda tensor, group: _groups[group].all_gather(tensor), "CPU")
resolve_operators()
_ops = torch.ops.tandem_testing


@dataclass(frozen=True, slots=True)
class QueuedGroup:
    """Implements `TpGroup` for a device: no rank waits, and none can free another."""

    group: TpGroup
    number: int

    @classmethod
    def around(cls, group: TpGroup) -> "QueuedGroup":
        made = cls(group, next(_numbers))
        _groups[made.number] = group
        return made

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def can_meet_again(self) -> bool:
        return False

    def all_reduce(self, tensor: Tensor) -> Tensor:
        _ops.all_reduce(tensor, self.number)
        return tensor

    def least(self, tensor: Tensor) -> Tensor:
        _ops.least(tensor, self.number)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return _ops.all_gather(tensor, self.number)

    def broadcast(self, tensor: Tensor) -> Tensor:
        _ops.broadcast(tensor, self.number)
        return tensor

    def leave(self) -> None:
        self.group.leave()

    def meet_again(self) -> None:
        """No rank has left."""


def simulated_ranks(checkpoint: Path, size: int, platform: Callable[[], Platform]) -> ThreadRanks:
    """Every rank's part of the checkpoint, for engines on what `platform` makes."""
    store, config = HashStore(), EngineConfig(
        model_path=str(checkpoint), dtype="float32", parallel=ParallelConfig(tp_size=size)
    )  # fmt: skip

    def load_part(rank: int) -> LoadedModel:
        parallel = join_ranks(store, rank=rank, size=size, device=torch.device("cpu"), timeout_s=TIMEOUT_S)
        return load(config, progress=False, parallel=replace(parallel, forward=QueuedGroup.around(parallel.forward)))

    with without_fused_steps(), ThreadPoolExecutor(size, thread_name_prefix="rank") as threads:
        return ThreadRanks(parts=tuple(threads.map(load_part, range(size))), platform=platform)
