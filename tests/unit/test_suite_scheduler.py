"""Units of the suite's scheduler, their order, and what a crash of a worker leaves of a run."""

import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tandem_testing import suite_scheduler
from tandem_testing.suite_scheduler import SuiteScheduling, unit_of

COLLECTED = [
    *("a.py::one", "a.py::two", "a.py::three", "a.py::four"),
    *("b.py::one@group", "c.py::one@group", "c.py::two[x@y]", "c.py::three"),
    *("d.py::one", "d.py::two", "d.py::three"),
]


@dataclass(eq=False)
class Worker:
    """As much of xdist's controller of a worker as a scheduler calls."""

    gateway: Any = field(default_factory=lambda: SimpleNamespace(id="worker"))
    sent: list[str] = field(default_factory=list)
    shutting_down: bool = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent += [COLLECTED[index] for index in indices]

    def shutdown(self) -> None:
        self.shutting_down = True


def scheduling(*workers: Worker) -> SuiteScheduling:
    options: dict[str, Any] = {"tx": ["popen"] * len(workers)}
    config = SimpleNamespace(getvalue=options.get, option=SimpleNamespace(loadscopereorder=True))
    scheduler = SuiteScheduling(config)
    for worker in workers:
        scheduler.add_node(worker)
    for worker in workers:
        scheduler.add_node_collection(worker, COLLECTED)
    scheduler.schedule()
    return scheduler


def done(scheduler: SuiteScheduling, worker: Worker, *tests: str) -> None:
    for test in tests:
        scheduler.mark_test_complete(worker, COLLECTED.index(test))


@pytest.mark.parametrize(
    ("nodeid", "unit"),
    [("a/b.py::test", "a/b.py"), ("b.py::C::test[x::y]", "b.py"), ("b.py::t[x@y]", "b.py"), ("b.py::t[x@y]@g", "g")],
)
def test_unit_of_a_test_is_its_group_or_its_file(nodeid, unit):
    assert unit_of(nodeid) == unit


def test_units_are_begun_in_order_of_collection():
    first, second = Worker(), Worker()
    scheduler = scheduling(first, second)
    assert first.sent == COLLECTED[:4]
    assert second.sent == [*COLLECTED[4:6], *COLLECTED[6:8]]
    done(scheduler, first, *COLLECTED[:2])
    assert first.sent == [*COLLECTED[:4], *COLLECTED[8:]]


def test_crashed_test_is_not_run_again_and_others_are():
    first, second = Worker(), Worker()
    scheduler = scheduling(first, second)
    done(scheduler, first, "a.py::one")
    assert scheduler.remove_node(first) == "a.py::two"
    done(scheduler, second, *COLLECTED[4:7])
    assert second.sent[4:] == ["a.py::three", "a.py::four"]


def test_worker_without_collection_gets_no_work():
    """The replacement of a crashed worker still collects while the other crashes, too."""
    first, second, replacement = Worker(), Worker(), Worker()
    scheduler = scheduling(first, second)
    scheduler.remove_node(first)
    scheduler.add_node(replacement)
    assert scheduler.remove_node(second) == "b.py::one@group"
    assert replacement.sent == []
    scheduler.add_node_collection(replacement, COLLECTED)
    scheduler.schedule()
    assert replacement.sent == ["c.py::one@group", "c.py::two[x@y]", "c.py::three"]


def test_worker_with_one_test_to_run_gets_another_unit():
    """It would wait for the next test before it runs the one."""
    crashed, second, replacement = Worker(), Worker(), Worker()
    scheduler = scheduling(crashed, second)
    done(scheduler, crashed, *COLLECTED[:3], *COLLECTED[8:])
    done(scheduler, second, *COLLECTED[4:7])
    assert second.shutting_down
    assert scheduler.remove_node(crashed) == "a.py::four"
    scheduler.add_node(replacement)
    scheduler.add_node_collection(replacement, COLLECTED)
    scheduler.schedule()
    assert replacement.shutting_down


def test_crash_in_the_last_test_ends_the_run():
    worker = Worker()
    scheduler = scheduling(worker)
    done(scheduler, worker, *COLLECTED[:4], *COLLECTED[4:-1])
    assert scheduler.remove_node(worker) == COLLECTED[-1]
    assert not scheduler.workqueue
    assert scheduler.tests_finished


@dataclass(frozen=True)
class Item:
    nodeid: str
    marks: tuple[str, ...] = ()

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


@pytest.mark.parametrize(("config", "sorts"), [(SimpleNamespace(workerinput={}), True), (SimpleNamespace(), False)])
def test_units_begin_with_those_of_a_cluster_then_slow_ones(config, sorts):
    plain, slow, beside = Item("a.py::t"), Item("b.py::t", ("slow",)), Item("b.py::u")
    cluster = Item("c.py::t@kube", ("slow", "kube"))
    items: list[Any] = [plain, slow, beside, cluster]
    suite_scheduler.pytest_collection_modifyitems(config, items)
    assert items == ([cluster, slow, beside, plain] if sorts else [plain, slow, beside, cluster])


def test_slow_units_that_wait_alternate_with_those_that_compute():
    names = ["chaos/a", "chaos/b", "integration/a", "numerics/a", "numerics/b", "unit/a"]
    slow: list[Any] = [Item(f"tests/{name}.py::t", ("slow",)) for name in names]
    grouped: Any = Item("tests/integration/b.py::t@system", ("slow",))
    items = [*slow, grouped, Item("tests/unit/b.py::t"), Item("tests/chaos/c.py::t")]
    suite_scheduler.pytest_collection_modifyitems(SimpleNamespace(workerinput={}), items)
    begun = [unit_of(item.nodeid).removeprefix("tests/").removesuffix(".py") for item in items]
    assert begun[:7] == ["chaos/a", "numerics/a", "chaos/b", "numerics/b", "integration/a", "unit/a", "system"]
    assert begun[7:] == ["unit/b", "chaos/c"]


CRASHING = """
import os, signal
import pytest

@pytest.mark.parametrize("number", range(6))
def test_some(number, record_property):
    if number in (1, 4):
        os.kill(os.getpid(), signal.SIGKILL)
"""
SLOW = """
import pytest

pytestmark = pytest.mark.slow

def test_begins_first():
    pass
"""


def test_suite_run_continues_after_killed_pytest_workers(tmp_path):
    (tmp_path / "conftest.py").write_text(f"from {suite_scheduler.__name__} import *\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: of the suite\n")
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).write_text(CRASHING)
    (tmp_path / "test_slow.py").write_text(SLOW)
    command = [sys.executable, "-m", "pytest", "-v", "-n", "2", "--dist", "loadgroup", "-p", "no:randomly"]
    ended = subprocess.run(
        [*command, "-p", "no:schemathesis", "-p", "no:langsmith_plugin"],
        cwd=tmp_path,
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "INTERNALERROR" not in ended.stdout
    assert "4 failed, 9 passed" in ended.stdout, ended.stdout + ended.stderr
    assert ended.returncode == 1
    for test in ("test_a.py::test_some[1]", "test_b.py::test_some[4]"):
        assert ended.stdout.count(f"crashed while running '{test}'") == 1
