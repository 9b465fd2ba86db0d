"""Which cores, and how much memory, each worker of one `tandem up` gets.

    free → claimed by one file lock per core → held while the `Cores` object lives, at most until the process exits

Without locks two systems would bind their workers to the same first cores while others are idle. The second system
takes the cores that the first left, or binds to none if these are too few.

Workers that start at the same time all find the same memory free. Where a container is too small for pools of the
default size, each gets a share of its limit, which does not depend on the order of starts, and holds for a worker that
is restarted next to others.
"""

import fcntl
from collections.abc import Collection
from dataclasses import dataclass, field
from math import floor
from pathlib import Path
from typing import IO

from tandem_engine.base.cgroups import memory_limit
from tandem_engine.base.linux import can_bind, format_cpus
from tandem_engine.config.cache import DEFAULT_KV_BYTES
from tandem_services.common.private_folder import private_folder


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores of each worker, in the format of `--cpu-affinity`; empty if workers are not bound."""

    of_worker: tuple[str, ...] = ()
    locks: tuple[IO[str], ...] = field(default=(), repr=False, compare=False)

    def flag(self, worker: int) -> str | None:
        """Value of `--cpu-affinity` for worker number `worker`; None if it is not bound."""
        return self.of_worker[worker] if self.of_worker else None

    def release(self) -> None:
        """Releases the locks."""
        for lock in self.locks:
            lock.close()


def claim(allowed: Collection[int], *, workers: int, threads: int, folder: Path | None = None) -> Cores:
    """Claims `threads` cores for each worker, or none at all if there are too few or they cannot be claimed.

    `folder`: folder of the locks (default: one of this user).
    """
    if not can_bind() or workers < 2 or workers * threads > len(allowed):
        return Cores()
    try:
        taken = _lock(sorted(allowed), workers * threads, folder or private_folder("cores"))
    except OSError:
        # Not being bound costs little; not starting would cost everything.
        return Cores()
    if len(taken) < workers * threads:
        for lock in taken.values():
            lock.close()
        return Cores()
    cpus = list(taken)
    shares = (cpus[worker * threads : (worker + 1) * threads] for worker in range(workers))
    return Cores(of_worker=tuple(map(format_cpus, shares)), locks=tuple(taken.values()))


def _lock(cpus: Collection[int], wanted: int, folder: Path) -> dict[int, IO[str]]:
    """Locks of the first free cores, at most `wanted`."""
    taken: dict[int, IO[str]] = {}
    for cpu in cpus:
        if len(taken) == wanted:
            break
        lock = (folder / str(cpu)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
        else:
            taken[cpu] = lock
    return taken


WORKER_BYTES = 512 << 20
"""Of a worker on a CPU, without weights and pool: torch and kernels, what steps take, the worker service."""

SERVICES_BYTES = 192 << 20
"""Of the gateway, Redis and `tandem up`, with requests."""

SPARE = 0.05
"""Of what workers get: nothing is measured so well that none has to stay free."""


def share_of_worker(folder: Path, workers: int) -> float | None:
    """`mem_fraction_static` of each of `workers` with the checkpoint in `folder`; None where memory is no concern."""
    limit = memory_limit()
    if limit is None or limit >= workers * (DEFAULT_KV_BYTES + _weights(folder) + WORKER_BYTES) + SERVICES_BYTES:
        return None
    share = (limit - SERVICES_BYTES) / limit * (1 - SPARE) / workers
    return max(0.01, floor(share * 1e4) / 1e4)


def _weights(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
