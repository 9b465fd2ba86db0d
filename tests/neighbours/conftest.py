"""Fixtures of the tests with neighbours: the control plane and Helm of other tests, and one line for all skips."""

from collections.abc import Generator

import pytest

from tandem_testing.control_plane import control_plane, namespace
from tandem_testing.helm_library import helm
from tandem_testing.neighbours import NOT_RUN
from tandem_testing.skip_lines import at_one_place

__all__ = ["control_plane", "helm", "namespace"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return at_one_place((yield), NOT_RUN, __file__)
