"""How a worker of pytest-xdist ended that crashed, and where its threads were.

xdist names the test that ran, and no more: what the worker writes to its standard error is captured by pytest, and lost
with it.

    controller ─ path of a file ─▶ worker: on SIGSEGV, SIGABRT, SIGBUS and such, faulthandler writes all stacks there
    worker ends ─▶ exit status or signal, what the kernel has killed for memory, stacks ─▶ report of the test
"""

import faulthandler
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from xdist.workermanage import WorkerController

STACKS = "stacks_of_a_crash"
"""Name of the path, in what a worker is given."""
EXIT_S = 10.0
"""Its connection is closed before its process has ended."""
VMSTAT = Path("/proc/vmstat")


def killed_for_memory() -> int:
    """Processes that the kernel has killed since it started because memory was short."""
    fields = (line.split() for line in VMSTAT.read_text("ascii").splitlines())
    return next((int(count) for name, count in fields if name == "oom_kill"), 0)


def ending(process: "subprocess.Popen[bytes]") -> str:
    """How it ended, in words."""
    try:
        status = process.wait(EXIT_S)
    except subprocess.TimeoutExpired:
        return f"process {process.pid} closed its connection and still runs"
    if status < 0:
        return f"process {process.pid} was ended by {signal.Signals(-status).name}"
    return f"process {process.pid} exited with status {status}"


@dataclass(kw_only=True)
class Crashes:
    """Of the workers of one controller."""

    folder: "TemporaryDirectory[str]" = field(default_factory=TemporaryDirectory)
    counted: int = field(default_factory=killed_for_memory)
    """When the last worker crashed, or the first began."""
    last: str = ""

    def stacks_of(self, node: WorkerController) -> Path:
        return Path(self.folder.name) / node.gateway.id

    def describe(self, node: WorkerController) -> str:
        """One line, and the stacks if there are any."""
        before, self.counted = self.counted, killed_for_memory()
        output = f"{ending(node.gateway._io.popen)}; killed for memory by the kernel: {self.counted - before}"
        stacks = self.stacks_of(node)
        return f"{output}\n{stacks.read_text('utf-8', 'replace')}" if stacks.exists() else output


CRASHES = pytest.StashKey[Crashes]()
STACKS_FILE = pytest.StashKey[Any]()


def _crashes(config: pytest.Config) -> Crashes:
    if CRASHES not in config.stash:
        config.stash[CRASHES] = Crashes()
    return config.stash[CRASHES]


# In the controller


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    node.workerinput[STACKS] = str(_crashes(node.config).stacks_of(node))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController, error: object) -> None:
    if error:
        _crashes(node.config).last = _crashes(node.config).describe(node)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: pytest.TestReport, sched: Any) -> None:
    """Called right after `pytest_testnodedown`, with the report of the test that ran."""
    report.longrepr = f"{report.longrepr}: {_crashes(sched.config).last}"


# In a worker


def pytest_sessionstart(session: pytest.Session) -> None:
    given = getattr(session.config, "workerinput", {})
    if STACKS in given:
        session.config.stash[STACKS_FILE] = file = Path(given[STACKS]).open("w")  # noqa: SIM115 - open to the end
        faulthandler.enable(file)
