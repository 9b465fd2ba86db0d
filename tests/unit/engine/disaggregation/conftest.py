"""Engines under test, whose other end is played line by line."""

import pytest

from tandem_testing.disagg_played import Receiver


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()
