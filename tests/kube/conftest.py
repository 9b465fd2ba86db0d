"""Fixtures of the tests against a real control plane. They all live in this folder: one cluster serves them."""

from collections.abc import Generator

import pytest

from tandem_testing.control_plane import ABOUT, NOT_RUN, control_plane, namespace
from tandem_testing.skip_lines import at_one_place

__all__ = ["control_plane", "namespace"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tests that are skipped for want of a cluster are skipped at one place: the report has one line for all."""
    return at_one_place((yield), NOT_RUN, __file__)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what the tests ran against."""
    about = config.stash.get(ABOUT, None)
    if about is not None:
        terminalreporter.write_line(about)
