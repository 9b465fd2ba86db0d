"""Memory, shared memory, the directories that are written to, and limits: open files, threads and processes, locked
memory.
"""

import os
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tandem_engine.base.cgroups import memory_limit, process_limit
from tandem_services.cli.doctor.finding import Check, Finding, Machine, fail, ok, warn

GIB = 1 << 30
MIN_MEMORY = 2 * GIB
"""Two workers of the bundled model, and a gateway."""
MIN_SHARED = GIB // 2
MIN_DISK = GIB

MIN_FILES = 4096
"""Of a gateway with a thousand streams and their workers."""

MIN_PROCESSES = 256
"""Threads and processes of a gateway and two workers, thrice."""

MIN_LOCKED = 64 << 20


def checks(machine: Machine, folders: tuple[tuple[str, Path, str], ...]) -> Iterator[Check]:
    """`folders`: (name, folder, what chooses another one)."""
    yield Check(name="memory", probe=partial(memory, machine))
    yield Check(name="shared memory", probe=partial(shared_memory, machine.dev / "shm"))
    for name, folder, choice in folders:
        yield Check(name=name, probe=partial(disk, folder, choice))
    yield Check(name="open files", probe=lambda: open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    yield Check(name="threads and processes", probe=lambda: processes(process_limit()))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield Check(name="locked memory", probe=partial(locked_memory, machine, locked))


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


def open_files(limit: int) -> Finding:
    """The hard limit: processes raise their soft one to it."""
    if limit == resource.RLIM_INFINITY:
        return ok("no limit")
    fact = f"at most {limit} open files"
    return (
        warn(fact, "ulimit -Hn 65536 as root, or LimitNOFILE=65536 of the service") if (limit < MIN_FILES) else ok(fact)
    )


def processes(limit: tuple[int, int] | None) -> Finding:
    """Those that run in this container, and how many may."""
    if limit is None:
        return ok("no limit")
    running, most = limit
    fact = f"{running} of at most {most} in this container"
    fix = f"a limit of {MIN_PROCESSES} (podPidsLimit of the kubelet, --pids-limit of docker)"
    return warn(fact, fix) if most - running < MIN_PROCESSES else ok(fact)


def locked_memory(machine: Machine, limit: int) -> Finding:
    """Network cards and GPUs read locked memory."""
    if limit == resource.RLIM_INFINITY:
        return ok("no limit")
    fact = f"at most {limit >> 20} MiB of locked memory"
    has_rdma = any((machine.dev / "infiniband").glob("uverbs*"))
    if limit < MIN_LOCKED and (machine.has_gpu or has_rdma):
        return warn(fact, "ulimit -l unlimited, or LimitMEMLOCK=infinity of the service")
    return ok(fact)
