"""CPU seconds of each test file, with the processes that it starts: `python -m pytest -p tandem_testing.cpu_seconds`.

PYTHONPATH must have tests/support, because pytest imports this before it reads its own configuration.

Seconds on the clock are those of the machine's other work too; CPU seconds rank files on any machine. A process that a
fixture of the session starts is charged to each file for what it computes during that file's tests. At the end of a
run, the files in order; of a run on workers of xdist, `cpu-seconds-NAME.txt` for each.
"""

import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

TICKS = os.sysconf("SC_CLK_TCK")


class CpuSeconds:
    """Counts from the end of one file to the end of the next."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self._counted = _used()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, bool, bool]:
        result = yield
        if nextitem is None or nextitem.path != item.path:
            used = _used()
            self.files[item.nodeid.partition("::")[0]] += used - self._counted
            self._counted = used
        return result

    def lines(self) -> list[str]:
        ranked = self.files.most_common()
        return [f"{self.files.total():9.1f}  all", *(f"{seconds:9.1f}  {name}" for name, seconds in ranked)]


def _used() -> float:
    """By this process and its ended children, and by its living descendants and theirs."""
    return sum(os.times()[:4]) + sum(_used_by(pid) for pid in _descendants(os.getpid()))


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _read(task).split():
            found += [int(child), *_descendants(int(child))]
    return found


def _used_by(pid: int) -> float:
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / TICKS


def _read(path: Path) -> str:
    """Of a process that has ended, nothing: what it used is its parent's."""
    try:
        return path.read_text()
    except OSError:
        return ""


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuSeconds(), "cpu-seconds")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        lines = session.config.pluginmanager.get_plugin("cpu-seconds").lines()
        Path(f"cpu-seconds-{worker}.txt").write_text("\n".join([*lines, ""]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counted = config.pluginmanager.get_plugin("cpu-seconds")
    if counted.files:
        terminalreporter.section("CPU seconds")
        for line in counted.lines():
            terminalreporter.write_line(line)
