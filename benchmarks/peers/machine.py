"""The machine during a figure: waiting until it is idle, and how much of it others used.

OpenMP teams collapse when another process holds a core, and a peer that was not stopped is measured silently; so every
figure comes with the share of all cores that went to processes other than the one measured and the one measuring.
"""

import os
import platform
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

TICKS = os.sysconf("SC_CLK_TCK")
IDLE_SHARE = 0.06
"""Of all cores: less than this is idle."""
_WINDOW_S = 0.5
_PATIENCE_S = 6.0


def busy_seconds() -> float:
    """CPU seconds that all cores of the machine have been busy since it was started, time stolen from it left out."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:])
    return (user + nice + system + irq + softirq) / TICKS


def process_table() -> dict[int, tuple[int, float]]:
    """pid → (parent, CPU seconds of it and of its children that have been waited for)."""
    table = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            table[int(folder.name)] = (int(fields[1]), sum(map(int, fields[11:15])) / TICKS)
    return table


def descendants(root: int, table: dict[int, tuple[int, float]] | None = None) -> list[int]:
    """`root` and every process below it."""
    table = process_table() if table is None else table
    children = defaultdict(list)
    for pid, (parent, _) in table.items():
        children[parent].append(pid)
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children[pid]
    return found


def cpu_seconds(roots: Sequence[int]) -> float:
    """Of these processes and all below them."""
    table = process_table()
    pids = {pid for root in roots for pid in descendants(root, table)}
    return sum(table[pid][1] for pid in pids if pid in table)


class Watch:
    """`with Watch(pids) as watch: …`; then `seconds`, `own` (share of all cores) and `others` (the same)."""

    def __init__(self, roots: Sequence[int]) -> None:
        self._roots = roots
        self.seconds = self.own = self.others = 0.0

    def _counters(self) -> tuple[float, float, float]:
        return busy_seconds(), cpu_seconds(self._roots), time.process_time()

    def __enter__(self) -> Self:
        self._before = self._counters()
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = time.perf_counter() - self._began
        busy, measured, measuring = (now - before for now, before in zip(self._counters(), self._before, strict=True))
        capacity = self.seconds * (os.cpu_count() or 1)
        self.own = measured / capacity
        self.others = max(0.0, busy - measured - measuring) / capacity


def wait_until_idle() -> bool:
    """Whether it became idle within seconds. It is measured anyway: the report says what others used."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        before = busy_seconds()
        time.sleep(_WINDOW_S)
        if (busy_seconds() - before) / (_WINDOW_S * (os.cpu_count() or 1)) < IDLE_SHARE:
            return True
        if time.monotonic() > deadline:
            return False


def description() -> dict[str, str | int]:
    """What the report says about where it ran."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    memory = int(Path("/proc/meminfo").read_text().split()[1]) / (1 << 20)
    return {
        "cpu": name,
        "cores": os.cpu_count() or 1,
        "vectors": ", ".join(flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags)
        or "none",
        "memory_gib": round(memory),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
