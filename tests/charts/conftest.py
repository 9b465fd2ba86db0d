"""The Helm library for the tests of charts."""

from tandem_testing.helm_library import helm, pytest_runtest_makereport

__all__ = ["helm", "pytest_runtest_makereport"]
