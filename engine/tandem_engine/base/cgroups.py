"""Limits of this process's control groups: CPUs and memory, how often it was throttled, and what ended for memory.

A container with `limits.cpu: 4` on a node of 64 cores may run on all 64, but computes for 4 seconds per second. With
more threads than that, Linux stops all of them for the rest of each period (100 ms), and a step that waits for each of
its threads takes several times as long.

Both versions of control groups are read: version 2 (`cpu.max`, `cpu.stat`), and the cpu controller of version 1
(`cpu.cfs_quota_us`, `cpu.cfs_period_us`). A limit of any group up to the visible root counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tandem_engine.base.linux import allowed_cpus

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Throttling:
    """Of the group of this process since the group was made."""

    periods: int = 0
    """In which the group computed."""
    throttled: int = 0
    """Periods in which its quota was used up."""
    seconds: float = 0.0
    """For which its threads were stopped, added over the CPUs that they ran on."""


_HIGH = "memory.high"


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """One control group with a limit, in bytes."""

    limit: int
    used: int
    """Without cached files that could be dropped."""
    file: str
    """That has the limit."""

    @property
    def kills(self) -> bool:
        """Whether the kernel kills at the limit; else it stops processes until pages are free again."""
        return self.file != _HIGH


_PAGE_COUNTERS = {
    "memory.max": "memory.current",
    _HIGH: "memory.current",
    "memory.limit_in_bytes": "memory.usage_in_bytes",
}
"""Limits and use of a control group, as version 2 and version 1 name them."""

NO_LIMIT = 1 << 60


def own_groups(controller: str, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[Path]:
    """Folders of the control groups of this process that `controller` may limit, from its own up to the root."""
    for line in read_text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = cgroups
        elif controller in controllers.split(","):
            root = cgroups / controller
        else:
            continue
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            yield folder
            if folder == root:
                break


def memory_groups(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[MemoryGroup]:
    """Every control group that limits this process's memory, from its own up to the root that it can see."""
    for folder in own_groups("memory", proc=proc, cgroups=cgroups):
        for limit_file, used_file in _PAGE_COUNTERS.items():
            limit, used = read_text(folder / limit_file).strip(), read_text(folder / used_file).strip()
            # Without a limit version 2 has "max", and version 1 a number near 2^63.
            if limit.isdecimal() and int(limit) < NO_LIMIT:
                taken = int(used) - _droppable(folder / "memory.stat") if used.isdecimal() else 0
                yield MemoryGroup(limit=int(limit), used=max(0, taken), file=limit_file)


def memory_limit(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Bytes that the control groups of this process may use; None without a limit."""
    return min((group.limit for group in memory_groups(proc=proc, cgroups=cgroups)), default=None)


def describe_memory(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> str:
    """`memory_limit` and the file that has it, for a log line."""
    groups = memory_groups(proc=proc, cgroups=cgroups)
    least = min(groups, key=lambda group: group.limit, default=None)
    return "no memory limit" if least is None else f"a memory limit of {least.limit / (1 << 30):.2f} GiB ({least.file})"


def memory_kills(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Processes of this process's own control group that the kernel has killed because memory was short."""
    for folder in own_groups("memory", proc=proc, cgroups=cgroups):
        for name in ("memory.events", "memory.oom_control"):
            counts = _numbers(folder / name)
            if "oom_kill" in counts:
                return counts["oom_kill"]
    return 0


def machine_memory_kills(*, proc: Path = PROC) -> int | None:
    """Processes that the kernel of this machine has killed because memory was short, of any control group, since it
    started. None where it does not count them."""
    return _numbers(proc / "vmstat").get("oom_kill")


def memory_shortage(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> str:
    """Which memory was short when the kernel killed a process of this container: a clause of a sentence."""
    limits = [group.limit for group in memory_groups(proc=proc, cgroups=cgroups) if group.kills]
    fields = (line.split() for line in read_text(proc / "meminfo").splitlines())
    machine = next((int(field[1]) << 10 for field in fields if field[:1] == ["MemTotal:"]), NO_LIMIT)
    if min(limits, default=NO_LIMIT) >= machine:
        return "the memory of this machine was used up"
    return f"the memory limit of {min(limits) / (1 << 30):.2f} GiB was reached"


def process_limit(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> tuple[int, int] | None:
    """Threads and processes that run in the control group of this process with the least room, and how many may; None
    without a limit."""
    found = []
    for folder in own_groups("pids", proc=proc, cgroups=cgroups):
        running, most = read_text(folder / "pids.current").strip(), read_text(folder / "pids.max").strip()
        if running.isdecimal() and most.isdecimal():
            found.append((int(running), int(most)))
    return min(found, key=lambda group: group[1] - group[0], default=None)


def describe_process_limit(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> str:
    """Which limit keeps a thread from being started: a clause of a sentence."""
    limit = process_limit(proc=proc, cgroups=cgroups)
    if limit is not None and limit[0] >= limit[1] - 1:
        return f"this container runs {limit[0]} of {limit[1]} threads and processes (pids.max)"
    return "the limit of threads and processes of this user is reached (ulimit -u)"


def cpu_quota(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> float | None:
    """Seconds of CPU time per second that this process may use; None without a quota."""
    quotas = (_quota(folder) for folder in own_groups("cpu", proc=proc, cgroups=cgroups))
    return min((quota for quota in quotas if quota is not None), default=None)


def usable_cpus() -> int:
    """Threads that can compute at the same time: the allowed CPUs, within the quota rounded down, at least 1."""
    quota = cpu_quota()
    cpus = len(allowed_cpus())
    return max(1, cpus if quota is None else min(cpus, int(quota)))


def describe_cpus() -> str:
    """What `usable_cpus` follows from, for a log line."""
    quota = cpu_quota()
    limit = "no CPU quota" if quota is None else f"a CPU quota of {quota:g}"
    return f"{len(allowed_cpus())} allowed CPUs, {limit}"


def throttling(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> Throttling:
    """Of the innermost group that counts it; zeros where none does."""
    for folder in own_groups("cpu", proc=proc, cgroups=cgroups):
        counts = _numbers(folder / "cpu.stat")
        if "nr_periods" in counts:
            # Microseconds in version 2, nanoseconds in version 1.
            seconds = counts.get("throttled_usec", 0) / 1e6 + counts.get("throttled_time", 0) / 1e9
            return Throttling(counts["nr_periods"], counts.get("nr_throttled", 0), seconds)
    return Throttling()


def read_text(path: Path) -> str:
    """What a file of the kernel holds; nothing where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _quota(folder: Path) -> float | None:
    quota, _, period = read_text(folder / "cpu.max").strip().partition(" ")
    if not quota:
        quota = read_text(folder / "cpu.cfs_quota_us").strip()
        period = read_text(folder / "cpu.cfs_period_us").strip()
    # Version 2 has "max" and version 1 -1 for no limit.
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None
    return int(quota) / int(period)


def _droppable(stat: Path) -> int:
    """Bytes of cached files that no process has used for a while."""
    counts = _numbers(stat)
    return counts.get("total_inactive_file", counts.get("inactive_file", 0))


def _numbers(path: Path) -> dict[str, int]:
    fields = (line.split() for line in read_text(path).splitlines())
    return {field[0]: int(field[1]) for field in fields if len(field) == 2 and field[1].isdigit()}
