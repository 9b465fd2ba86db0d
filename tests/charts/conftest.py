"""The Helm library, one process for all tests of a worker."""

from collections.abc import Iterator

import pytest

from tandem_testing.helm_library import HelmLibrary


@pytest.fixture(scope="session")
def helm() -> Iterator[HelmLibrary]:
    library = HelmLibrary()
    yield library
    library.close()
