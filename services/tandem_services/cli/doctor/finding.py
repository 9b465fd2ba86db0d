"""What a check of `tandem doctor` is, and how checks run: at the same time, each with a limit. They change nothing."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tandem_engine.base.linux import allowed_cpus

LIMIT_S = 2.0
"""Of most checks."""


class Status(StrEnum):
    """Of a finding."""

    OK = "ok"
    WARN = "warn"
    """It works, slowly or not in all cases."""
    FAIL = "fail"
    """It will not start, or not serve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one check found."""

    status: Status
    fact: str
    fix: str = ""
    """A command or a flag; empty for `ok`."""


def ok(fact: str) -> Finding:
    return Finding(status=Status.OK, fact=fact)


def warn(fact: str, fix: str) -> Finding:
    return Finding(status=Status.WARN, fact=fact, fix=fix)


def fail(fact: str, fix: str) -> Finding:
    return Finding(status=Status.FAIL, fact=fact, fix=fix)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One question about this machine."""

    name: str
    probe: Callable[[], Finding]
    limit_s: float = LIMIT_S

    def run(self) -> Finding:
        """A probe that does not return in time, as on a disk that hangs, is left behind in its thread."""
        found: list[Finding] = []
        thread = threading.Thread(target=lambda: found.append(self._probed()), name=self.name, daemon=True)
        thread.start()
        thread.join(self.limit_s)
        return found[0] if found else warn(f"no answer within {self.limit_s:g} s", "try again when the machine is idle")

    def _probed(self) -> Finding:
        try:
            return self.probe()
        except OSError as error:
            return warn(f"cannot be read: {error}", "run as the user that serves")


def run_all(checks: Sequence[Check]) -> list[Finding]:
    """In the order of `checks`; takes as long as the slowest."""
    found: dict[int, Finding] = {}

    def run(number: int, check: Check) -> None:
        found[number] = check.run()

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(checks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(checks))]


def installed_version(distribution: str) -> str | None:
    """None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where checks look."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")
    dev: Path = Path("/dev")
    variables: Mapping[str, str] = field(default_factory=dict)
    cpus: frozenset[int] = field(default_factory=allowed_cpus)
    version_of: Callable[[str], str | None] = installed_version

    @property
    def has_gpu(self) -> bool:
        """An NVIDIA one that this process may open."""
        return any(self.dev.glob("nvidia[0-9]*"))
