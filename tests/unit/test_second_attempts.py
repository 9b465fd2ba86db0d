"""Tests of real processes that run again after a failure, and what the summary shows of it."""

import re
import subprocess
import sys

import pytest

from tandem_testing import second_attempts

TESTS = """
import gc, socket
import pytest

made, ran = [], []

@pytest.fixture(scope="session")
def lasting():
    made.append("lasting")
    yield
    made.append("ended")

@pytest.fixture(scope="session")
def broken_once():
    made.append("broken")
    assert made.count("broken") == 2, "first start"

@pytest.fixture
def short(lasting):
    made.append("short")
    yield
    made.append("short ended")

def test_flaky(short):
    ran.append(1)
    print("what it printed")
    left_open = [socket.socket()] if len(ran) == 1 else []
    left_open.append(left_open)
    assert len(ran) == 2, "reason one"

def test_fixtures_stayed():
    gc.collect()
    assert made == ["lasting", "short", "short ended", "short", "short ended"]

def test_start(broken_once):
    pass

async def test_fails():
    ran.append(1)
    assert False, f"reason {len(ran)}"

@pytest.mark.timeout(0.1)
def test_hangs():
    import time
    ran.append(1)
    time.sleep(60)

def test_one_too_many():
    ran.append(1)
    assert False, "no more"

def test_counts():
    assert len(ran) == 6
"""
ONCE = "runs = []\ndef test_one_process():\n    runs.append(1)\n    assert len(runs) == 2\n"


@pytest.fixture(scope="module", params=["alone", "xdist"])
def output(request, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("attempts")
    (folder / "conftest.py").write_text(f"from {second_attempts.__name__} import *\n")
    for kind, code in (("integration", TESTS), ("unit", ONCE)):
        (folder / "tests" / kind).mkdir(parents=True)
        (folder / "tests" / kind / f"test_{kind}.py").write_text(code)
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\nfilterwarnings = error\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:schemathesis", "-p", "no:langsmith_plugin", "--color=no"]
    ended = subprocess.run(
        [*command, *(["-n", "1"] if request.param == "xdist" else [])],
        cwd=folder,
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "INTERNALERROR" not in ended.stdout, ended.stdout
    return ended.stdout


def test_second_attempt_decides_with_fixtures_that_stayed(output):
    """So it does if a fixture of the session could not start. There is none after a timeout, nor after three reruns.

    A socket that the first attempt has left open is not held against a later test.
    """
    assert "4 failed, 4 passed, 3 rerun" in output, output
    failed = re.findall(r"^FAILED \S+::(\w+)", output, re.MULTILINE)
    assert sorted(failed) == ["test_fails", "test_hangs", "test_one_process", "test_one_too_many"]


def test_summary_shows_why_first_attempts_failed(output):
    failures, _, reruns = output.partition("reruns: bugs to mend")
    assert re.findall(r"^_+ RERUN \S+::(\w+) _+$", reruns, re.MULTILINE) == ["test_flaky", "test_start", "test_fails"]
    for reason in ("reason one", "what it printed", "first start", "reason 3"):
        assert reason in reruns
    assert "reason 4" in failures
