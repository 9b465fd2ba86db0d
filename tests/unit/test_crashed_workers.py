"""What the report of a test says whose worker crashed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tandem_testing import crashed_workers

CRASHING = """
import ctypes, os, signal

def test_killed():
    os.kill(os.getpid(), signal.SIGKILL)

def test_exited():
    os._exit(7)

def test_read_no_memory():
    ctypes.string_at(0)

def test_went_well():
    pass
"""
EXPECTED = {
    "test_killed": "was ended by SIGKILL; killed for memory by the kernel: ",
    "test_exited": "exited with status 7; killed for memory by the kernel: ",
    "test_read_no_memory": "was ended by SIGSEGV; killed for memory by the kernel: ",
}


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> str:
    folder: Path = tmp_path_factory.mktemp("crashes")
    (folder / "conftest.py").write_text(f"from {crashed_workers.__name__} import *\n")
    (folder / "test_some.py").write_text(CRASHING)
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:schemathesis", "-p", "no:langsmith_plugin"]
    ended = subprocess.run(
        command,
        cwd=folder,
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "INTERNALERROR" not in ended.stdout, ended.stdout
    assert "3 failed, 1 passed" in ended.stdout, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize("test", EXPECTED)
def test_crash_is_reported_with_how_the_process_ended(output, test):
    (line,) = [line for line in output.splitlines() if f"::{test}': process " in line and "FAILED" not in line]
    assert EXPECTED[test] in line


def test_crash_by_a_signal_is_reported_with_the_stacks(output):
    assert "Fatal Python error: Segmentation fault" in output
    assert "in test_read_no_memory" in output


def test_process_that_still_runs_is_named(monkeypatch):
    monkeypatch.setattr(crashed_workers, "EXIT_S", 0.0)
    with subprocess.Popen(("sleep", "60")) as process:
        assert crashed_workers.ending(process) == f"process {process.pid} closed its connection and still runs"
        process.kill()
