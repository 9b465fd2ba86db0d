"""A plug-in of pytest: a line for each test as soon as it ends, and none that has one is run again."""

import os
from pathlib import Path

import pytest

from gpu.control.lines import Check, LineFile

MAX_REASON = 2000


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every process of xdist has to find the same tests: the list of done cases does not change during the run."""
    done = set(Path(os.environ["GPU_LINES_DONE"]).read_text("utf-8").splitlines())
    dropped = [item for item in items if item.nodeid in done]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the process that reports, which is one of them."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        return
    if report.when == "call" or (report.when == "setup" and not report.passed):
        outcome = report.outcome
        why = "" if report.passed else str(report.longrepr)[-MAX_REASON:]
        line = Check(
            part=os.environ["GPU_LINES_PART"],
            case=report.nodeid,
            outcome=outcome,
            why=why,
            seconds=round(report.duration, 2),
        )
        LineFile(Path(os.environ["GPU_LINES_OUT"])).write(line)
