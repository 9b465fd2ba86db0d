"""Reads /proc: CPU time of sessions, and whether a process id still belongs to the same process."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")

_STATE, _SESSION, _UTIME, _STIME, _CUTIME, _CSTIME, _STARTED = 0, 3, 11, 12, 13, 14, 19
"""Of the fields of /proc/PID/stat after the name: 3, 6, 14 to 17 and 22 of proc(5)."""


def session_cpu_seconds(sessions: Collection[int], proc: Path = PROC) -> Mapping[int, float]:
    """CPU time by session id: of its processes, and of those of their children that have ended.

    0 where a session has no process, or where the system has no /proc.
    """
    ticks: defaultdict[int, int] = defaultdict(int)
    for folder in proc.glob("[0-9]*"):
        fields = _stat(folder)
        if fields is not None and (session := int(fields[_SESSION])) in sessions:
            ticks[session] += sum(int(fields[at]) for at in (_UTIME, _STIME, _CUTIME, _CSTIME))
    per_second = os.sysconf("SC_CLK_TCK")
    return {session: ticks[session] / per_second for session in sessions}


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Of one process, among all that had or will have its number, over restarts of the machine too."""

    pid: int
    started: int
    """Ticks since the machine started."""
    boot: str
    command: str
    """Digest of its command line, which may hold a password."""

    @classmethod
    def of(cls, pid: int, proc: Path = PROC) -> "Identity | None":
        """None where there is no such process, or it has ended and waits for its parent."""
        fields = _stat(proc / str(pid))
        if fields is None or fields[_STATE] in "ZX":
            return None
        try:
            command = (proc / str(pid) / "cmdline").read_bytes()
            boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return None
        return cls(pid=pid, started=int(fields[_STARTED]), boot=boot, command=hashlib.sha256(command).hexdigest())

    @property
    def is_running(self) -> bool:
        """Whether the number still means this process."""
        return Identity.of(self.pid) == self


def _stat(folder: Path) -> list[str] | None:
    try:
        return (folder / "stat").read_text("ascii", "replace").rpartition(")")[2].split()
    except OSError:  # it has ended
        return None
