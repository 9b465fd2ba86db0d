"""What holds for every test: one compute thread per process, compiled modules that are kept, children that import the
same tree, the same examples in every run and no bound on their time, ports of this worker's own, servers that
end soon, and signals and logging as they were.

Tests run side by side, each with engines of its own; OpenMP threads that spin for work they do not get turn
milliseconds into minutes. Must happen before torch is imported anywhere; child processes inherit it.
"""

import gc
import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

from tandem_services.common import sockets
from tandem_testing.crashed_workers import (
    pytest_configure_node,
    pytest_handlecrashitem,
    pytest_sessionstart,
    pytest_testnodedown,
)
from tandem_testing.inherited_signals import give_children_default_signals
from tandem_testing.quick_http import make_http_quick
from tandem_testing.rewritten_tests import rewrite_share
from tandem_testing.second_attempts import (
    pytest_report_teststatus,
    pytest_runtest_protocol,
    pytest_terminal_summary,
)
from tandem_testing.suite_scheduler import pytest_collection_modifyitems, pytest_xdist_make_scheduler

__all__ = [  # hooks of pytest
    "pytest_collection_modifyitems",
    "pytest_configure_node",
    "pytest_handlecrashitem",
    "pytest_report_teststatus",
    "pytest_runtest_protocol",
    "pytest_sessionstart",
    "pytest_terminal_summary",
    "pytest_testnodedown",
    "pytest_xdist_make_scheduler",
]

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hundreds of processes that tests start would each compile every module of the product.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A test that needs a model hub starts one. No other request leaves this machine: nothing listens on this port.
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"

# On a machine with much to do the first of two equal examples takes longer than any bound that would find anything. And
# every run tries the same examples; `--hypothesis-profile searching` tries others each time.
settings.register_profile("searching", deadline=None)
settings.register_profile("patient", deadline=None, derandomize=True)
settings.load_profile("patient")

# Tests that run side by side look for free ports side by side.
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _workers
sockets.PORTS = sockets.PORTS[_worker::_workers]

give_children_default_signals()
make_http_quick()


def pytest_configure(config: pytest.Config) -> None:
    """Child processes import what this process imports, whether or not PYTHONPATH is set in the shell."""
    folders = [*map(str, config.getini("pythonpath")), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys(folders)))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is imported and collected stays. Looking for garbage in it would take a fifth of the time."""
    gc.disable()
    try:
        if hasattr(session.config, "workerinput"):
            rewrite_share(session.config, _worker, _workers)
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Later garbage collections, as those of an engine that measures its memory, do not look through it either."""
    gc.collect()
    gc.freeze()


ENDING = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    """A command that ends itself ignores signals from then on; processes that later tests start would inherit it."""
    before = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command logs to the standard error of its test, which is closed when later tests log."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
