"""Control groups that a test makes below the root of this container, of version 1 or 2, and starts a system in.

Where this user may not make groups, or a controller is not here, `can_limit` is false: the test says that it has not
checked.
"""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tandem_engine.base.cgroups import CGROUPS, own_groups, read_text
from tandem_engine.base.linux import allowed_cpus
from tandem_testing.system import System
from tandem_testing.waiting import wait_for

_FILES = {
    "memory": ("memory.max", "memory.limit_in_bytes"),
    "pids": ("pids.max", "pids.max"),
    "cpu": ("cpu.max", "cpu.cfs_quota_us"),
    "cpuset": ("cpuset.cpus", "cpuset.cpus"),
    "memory.high": ("memory.high", "memory.high"),
}
"""The limit of a controller in version 2 and in version 1. `memory.high` is of version 2 alone."""

PERIOD_US = 100_000
ONE_WORKER = ("--prefill", "0", "--decode", "0", "--both", "1")


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """One group, or the one that this process came from."""

    folder: Path
    controller: str

    @property
    def _is_version_2(self) -> bool:
        return (self.folder / "cgroup.controllers").exists()

    def _read(self, version_2: str, version_1: str) -> str:
        return (self.folder / (version_2 if self._is_version_2 else version_1)).read_text()

    def limit(self, most: float) -> None:
        """Bytes of memory, threads and processes, CPUs, or how many of the CPUs that this process may use.

        Raises `OSError` where the kernel rejects it.
        """
        file = self.folder / _FILES[self.controller][not self._is_version_2]
        if self.controller == "cpuset":
            self._limit_cpus(file, sorted(allowed_cpus())[: int(most)])
        elif self.controller != "cpu":
            file.write_text(str(int(most)))
        elif self._is_version_2:
            file.write_text(f"{int(most * PERIOD_US)} {PERIOD_US}")
        else:
            (self.folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            file.write_text(str(int(most * PERIOD_US)))

    def _limit_cpus(self, file: Path, cpus: Sequence[int]) -> None:
        """Version 1 lets no process enter before the group has memory nodes, too."""
        file.write_text(",".join(map(str, cpus)))
        if not self._is_version_2:
            (self.folder / "cpuset.mems").write_text((self.folder.parent / "cpuset.mems").read_text())

    def without_swap(self) -> None:
        """A group that may swap is slow at its limit instead of killed."""
        for name, most in (("memory.swap.max", "0"), ("memory.swappiness", "0")):
            if (self.folder / name).exists():
                (self.folder / name).write_text(most)

    def processes(self) -> set[int]:
        """Of this group, those of other process namespaces excepted."""
        return {int(pid) for pid in read_text(self.folder / "cgroup.procs").split()} - {0}

    def used(self) -> int:
        """Bytes of memory with caches, or threads and processes."""
        if self.controller == "pids":
            return int((self.folder / "pids.current").read_text())
        return int(self._read("memory.current", "memory.usage_in_bytes"))

    def kept(self) -> int:
        """Bytes of memory that are not in files."""
        counts = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        return int(counts["anon"] if self._is_version_2 else counts["total_rss"])

    def kills(self) -> int:
        """Processes that the kernel has killed at the memory limit."""
        counts = dict(line.split() for line in self._read("memory.events", "memory.oom_control").splitlines())
        return int(counts["oom_kill"])

    def starting(self) -> tuple[str, ...]:
        """Command that enters this group and then runs its arguments. Threads of this process are never counted."""
        return ("sh", "-euc", f'echo $$ > {self.folder}/cgroup.procs\nexec "$@"', "sh")

    def enter(self) -> None:
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def end(self) -> None:
        """Kill what is left in it, and remove it."""
        for pid in self.processes() - {os.getpid()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not self.processes(), 60.0)
        self.folder.rmdir()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What is started in the block is in this group."""
        home = _home(self.controller)
        assert home is not None, f"this process has no visible group of {self.controller}"
        self.enter()
        try:
            yield
        finally:
            home.enter()


def _home(controller: str) -> ControlGroup | None:
    """The group of this process; None where it is not visible, or nothing may be moved into it."""
    for folder in own_groups(controller):
        home = ControlGroup(folder, controller)
        if os.getpid() in home.processes():
            try:
                home.enter()
            except OSError:
                return None
            return home
    return None


def _new_group(controller: str) -> ControlGroup | None:
    """None where this user may not make groups, or `controller`, one of `_FILES`, is elsewhere."""
    for root in (CGROUPS, CGROUPS / controller):
        folder = root / f"tandem-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        if any((folder / file).exists() for file in _FILES[controller]):
            return ControlGroup(folder, controller)
        folder.rmdir()
    return None


def can_limit(controller: str) -> bool:
    """Whether a test can start processes in a group of its making."""
    if _home(controller) is None:
        return False
    group = _new_group(controller)
    if group is not None:
        group.folder.rmdir()
    return group is not None


@contextmanager
def new_group(controller: str) -> Iterator[ControlGroup]:
    """A group without a limit, for the time of the block."""
    group = _new_group(controller)
    assert group is not None, "can_limit said that a group can be made"
    try:
        group.without_swap()
        yield group
    finally:
        group.end()


@contextmanager
def system_within(
    group: ControlGroup | None, run_dir: Path, *flags: str, prefix: Sequence[str] = ()
) -> Iterator[System]:
    """A system of one worker whose processes are in `group`. `prefix`: see `System.launch`."""
    with nullcontext() if group is None else group.entered():
        system = System.launch(run_dir, *ONE_WORKER, *flags, prefix=prefix)
    try:
        system.wait_until_up()
        yield system
    finally:
        system.close()
