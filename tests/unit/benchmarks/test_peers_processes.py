"""No process of a comparison stays behind, and one that is not being timed computes nothing."""

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem_testing.benchmark_modules import benchmarks_importable

# One after the other: each ends what belongs to no process, and that may be another test's.
pytestmark = pytest.mark.xdist_group("peers-processes")

SPAWNS_ANOTHER = ["sh", "-c", "setsid env -i sleep 60 & exec sleep 60"]
"""One in a session of its own, without the mark: vLLM's processes lose it with their title."""


@pytest.fixture(scope="module")
def processes():
    with benchmarks_importable():
        yield importlib.import_module("peers.processes")


def machine():
    return importlib.import_module("peers.machine")


@pytest.fixture
def started(processes, tmp_path):
    process = processes.start(SPAWNS_ANOTHER, log=tmp_path / "log")
    while len(machine().descendants(process.pid)) < 2:
        pass
    yield process
    processes.stop(process)


def state(pid):
    """As the kernel writes it, "" for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_stopping_ends_children_in_sessions_of_their_own(processes, started):
    pids = machine().descendants(started.pid)
    processes.stop(started)
    assert started.returncode == -signal.SIGTERM
    assert {state(pid) for pid in pids} <= {"", "Z"}


def test_paused_tree_is_stopped_whole_and_can_be_ended(processes, started):
    pids = machine().descendants(started.pid)
    processes.pause(started)
    while {state(pid) for pid in pids} != {"T"}:
        pass
    processes.resume(started)
    while "T" in {state(pid) for pid in pids}:
        pass
    processes.pause(started)
    processes.stop(started)
    assert {state(pid) for pid in pids} <= {"", "Z"}


def test_processes_of_a_killed_run_are_ended_by_the_next(processes, tmp_path):
    code = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)"
    marked = {**os.environ, processes.MARK: "1073741824-0"}  # no process has this number
    reported = subprocess.run([sys.executable, "-c", code], env=marked, stdout=subprocess.PIPE, check=True).stdout
    orphan = int(reported)
    assert orphan in processes.end_marked()
    while state(orphan) not in ("", "Z"):
        pass


def test_unmarked_process_is_not_ended(processes):
    other = subprocess.Popen(["sleep", "60"])
    try:
        processes.end_marked()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_watch_reports_cpu_share_of_watched_processes(processes, tmp_path):
    busy = processes.start([sys.executable, "-c", "while True: pass"], log=tmp_path / "log")
    try:
        with machine().Watch([busy.pid]) as watch:
            before = machine().cpu_seconds([busy.pid])
            while machine().cpu_seconds([busy.pid]) - before < 0.1:
                pass
        assert watch.own > 0
        assert watch.own * watch.seconds * os.cpu_count() >= 0.08
    finally:
        processes.stop(busy)
