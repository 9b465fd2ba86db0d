"""Limits of the system: open files, threads and processes, locked memory."""

import resource
from collections.abc import Iterator
from functools import partial

from tandem_engine.base.cgroups import process_limit
from tandem_services.cli.doctor.finding import Check, Finding, Machine, ok, warn

MIN_FILES = 4096
"""Of a gateway with a thousand streams and their workers."""

MIN_PROCESSES = 256
"""Threads and processes of a gateway and two workers, thrice."""

MIN_LOCKED = 64 << 20


def checks(machine: Machine) -> Iterator[Check]:
    yield Check(name="open files", probe=lambda: open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    yield Check(name="threads and processes", probe=lambda: processes(process_limit()))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield Check(name="locked memory", probe=partial(locked_memory, machine, locked))


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
