"""Memory, shared memory, and the folders that are written to."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tandem_engine.base.cgroups import memory_limit
from tandem_services.cli.doctor.finding import Check, Finding, Machine, fail, ok, warn

GIB = 1 << 30
MIN_MEMORY = 2 * GIB
"""Two workers of the bundled model, and a gateway."""
MIN_SHARED = GIB // 2
MIN_DISK = GIB


def checks(machine: Machine, folders: tuple[tuple[str, Path, str], ...]) -> Iterator[Check]:
    """`folders`: (name, folder, what chooses another one)."""
    yield Check(name="memory", probe=partial(memory, machine))
    yield Check(name="shared memory", probe=partial(shared_memory, machine.dev / "shm"))
    for name, folder, choice in folders:
        yield Check(name=name, probe=partial(disk, folder, choice))


def memory(machine: Machine) -> Finding:
    lines = (machine.proc / "meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    limit = memory_limit(proc=machine.proc, cgroups=machine.cgroup)
    fact = f"{available / GIB:.1f} GiB available"
    if limit is not None:
        fact += f", {limit / GIB:.1f} GiB allowed by the cgroup"
    if min(available, available if limit is None else limit) < MIN_MEMORY:
        return warn(fact, "--prefill 0 --decode 0 --both 1, and --kv-cache-gib with less than it takes by default")
    return ok(fact)


def shared_memory(folder: Path, minimum: int = MIN_SHARED) -> Finding:
    """Workers of one machine exchange KV through it."""
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return fail(f"{folder} is no folder that this user may write to", "mount -t tmpfs tmpfs /dev/shm")
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    fact = f"{free / GIB:.2f} GiB free in {folder}"
    if free < minimum:
        return warn(fact, f"--shm-size={MIN_SHARED >> 20}m for a container, else mount -o remount,size=50% {folder}")
    return ok(fact)


def disk(folder: Path, choice: str, minimum: int = MIN_DISK) -> Finding:
    """Of the folder, or of the one above in which it will be made."""
    there = next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return fail(f"{there} is no folder that this user may write to", choice)
    status = os.statvfs(there)
    free = status.f_bavail * status.f_frsize
    fact = f"{free / GIB:.1f} GiB free for {folder}"
    return warn(fact, f"free some, or {choice}") if free < minimum else ok(fact)
