"""How much memory there is, what this process has, and what a computation needs at its peak.

One interface for both kinds of memory that a KV pool can lie in. A process that runs in a container sees the
machine's memory in most places; what it may have is what its control groups allow.
"""

import gc
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

PAGE_COUNTERS = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
"""Limit and use of a control group, as version 2 and version 1 name them."""
RESET_PEAK = "5"
"""Written to clear_refs: the peak of the resident set starts anew (proc(5))."""


class MemoryMeter(Protocol):
    """Bytes of one device's memory."""

    def total(self) -> int:
        """What this process could have if it were alone."""
        ...

    def available(self) -> int:
        """What it could still take now, others' use considered."""
        ...

    def used(self) -> int:
        """What it has now, for itself."""
        ...

    def peak_growth(self, run: Callable[[], object]) -> int:
        """Call `run` and return by how much `used` exceeded its value before, at most, meanwhile."""
        ...


def meter_for(device: str | torch.device) -> MemoryMeter:
    """Of the memory that `device` computes in."""
    device = torch.device(device)
    return CudaMeter(device) if device.type == "cuda" else HostMeter()


@dataclass(frozen=True, slots=True)
class HostMeter:
    """Main memory, within the control groups of this process."""

    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")

    def total(self) -> int:
        return min((_kib(self.proc / "meminfo", "MemTotal"), *(group.limit for group in self._groups())))

    def available(self) -> int:
        free = (group.limit - group.used for group in self._groups())
        return max(0, min((_kib(self.proc / "meminfo", "MemAvailable"), *free)))

    def used(self) -> int:
        """Without libraries and other files, which are shared and can be read again."""
        status = self.proc / "self" / "status"
        return _kib(status, "VmRSS") - _kib(status, "RssFile")

    def peak_growth(self, run: Callable[[], object]) -> int:
        status = self.proc / "self" / "status"
        gc.collect()  # garbage that is freed meanwhile would hide as much of the growth
        before = _kib(status, "VmRSS")
        resettable = self._reset_peak()
        run()
        # Without a reset the peak is that of the whole life: too low only when loading took more than running.
        peak = _kib(status, "VmHWM") if resettable else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return max(0, peak - before)

    def _reset_peak(self) -> bool:
        try:
            (self.proc / "self" / "clear_refs").write_text(RESET_PEAK)
        except OSError:
            return False
        return True

    def _groups(self) -> "Iterator[Group]":
        """Every control group that limits this process, from its own up to the root that it can see."""
        for line in _read(self.proc / "self" / "cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                root = self.cgroups
            elif "memory" in controllers.split(","):
                root = self.cgroups / "memory"
            else:
                continue
            own = root / path.lstrip("/")
            for folder in (own, *own.parents):
                yield from _group(folder)
                if folder == root:
                    break


@dataclass(frozen=True, slots=True)
class Group:
    """One control group with a limit."""

    limit: int
    used: int
    """Without cached files that could be dropped."""


@dataclass(frozen=True, slots=True)
class CudaMeter:
    """Memory of one GPU, as torch's allocator sees it."""

    device: torch.device

    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[1])

    def available(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def used(self) -> int:
        """What torch's allocator has, that of graphs included; not what the driver takes for a process."""
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_reserved(self.device))

    def peak_growth(self, run: Callable[[], object]) -> int:
        """In what torch's allocator takes of the card, which is more than what it has given: it takes large pieces,
        and each stream has its own.
        """
        gc.collect()
        torch.cuda.synchronize(self.device)
        before = self.used()
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return int(torch.cuda.max_memory_reserved(self.device)) - before


def _group(folder: Path) -> Iterator[Group]:
    """The limit in `folder`, if there is one."""
    for limit_file, used_file in PAGE_COUNTERS.items():
        limit, used = _read(folder / limit_file).strip(), _read(folder / used_file).strip()
        # Version 2 says "max" and version 1 a number beyond all memory for no limit.
        if limit.isdigit() and used.isdigit():
            yield Group(limit=int(limit), used=int(used) - _droppable(folder / "memory.stat"))


def _droppable(stat: Path) -> int:
    """Bytes of cached files that nobody has used for a while."""
    fields = dict(line.split(" ", 1) for line in _read(stat).splitlines() if " " in line)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))


def _kib(path: Path, name: str) -> int:
    """Bytes of a field that the kernel gives in KiB; 0 when it does not."""
    for line in _read(path).splitlines():
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) * 1024
    return 0


def _read(path: Path) -> str:
    """ "" for what is not there: which files exist depends on kernel and container."""
    try:
        return path.read_text()
    except OSError:
        return ""
