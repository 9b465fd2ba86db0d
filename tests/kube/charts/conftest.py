"""Helm and releases of our charts in the cluster of the tests."""

from tandem_testing.helm_library import helm, pytest_runtest_makereport
from tandem_testing.helm_releases import operator, second

__all__ = ["helm", "operator", "pytest_runtest_makereport", "second"]
