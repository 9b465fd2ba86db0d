"""What holds for every test: one compute thread per process, no bound on an example's time, and signals as they were.

Tests run side by side, each with engines of its own; OpenMP threads that spin for work they do not get turn
milliseconds into minutes. Must happen before torch is imported anywhere; child processes inherit it.
"""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

# On a machine with much to do the first of two equal examples takes longer than any bound that would find anything.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

ENDING = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    """A command that ends itself ignores signals from then on; processes that later tests start would inherit it."""
    before = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
