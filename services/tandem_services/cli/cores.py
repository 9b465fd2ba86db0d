"""Reserves CPU cores for the workers of one `tandem up`, so that no other `tandem up` of this user binds to them.

    free → claimed by one file lock per core → held while the `Cores` object lives, at most until the process exits

Without it two systems would bind their workers to the same first cores while others are idle. The second system takes
the cores that the first left, or binds to none if these are too few.
"""

import fcntl
import os
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tandem_engine.base.linux import can_bind, format_cpus


@dataclass(frozen=True, slots=True)
class Cores:
    """Those of each worker, as `--cpu-affinity` takes them; empty where they are not bound."""

    of_worker: tuple[str, ...] = ()
    locks: tuple[IO[str], ...] = field(default=(), repr=False, compare=False)

    def flag(self, worker: int) -> str | None:
        """For worker number `worker`; None where it is not bound."""
        return self.of_worker[worker] if self.of_worker else None

    def release(self) -> None:
        """Others may have them."""
        for lock in self.locks:
            lock.close()


def claim(allowed: Collection[int], *, workers: int, threads: int, folder: Path | None = None) -> Cores:
    """`threads` cores for each worker; none for any of them where there are too few, or cores cannot be claimed.

    `folder`: of the locks, instead of one of this user's.
    """
    if not can_bind() or workers < 2 or workers * threads > len(allowed):
        return Cores()
    try:
        taken = _lock(sorted(allowed), workers * threads, folder or _own_folder())
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


def _own_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"tandem-cores-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def _lock(cpus: Collection[int], wanted: int, folder: Path) -> dict[int, IO[str]]:
    """The first that are free, at most as many as wanted."""
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
