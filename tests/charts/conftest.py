"""The Helm library for the tests of charts."""

from tandem_testing.helm_library import helm

__all__ = ["helm"]
