"""Tests run in the background of a shell, where SIGINT is ignored, or under nohup: their children still get signals."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem_testing.system import System

TESTS = Path(__file__).resolve().parents[1]
IGNORED = (signal.SIGINT, signal.SIGHUP)
CHILD = "import signal; print([int(signal.getsignal(n) is signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGHUP)])"
PARENT = f"""
import signal, subprocess, sys
{{prepare}}
subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
"""


def ignore_signals() -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)


@pytest.mark.parametrize(
    ("prepare", "ignored"), [("", "[1, 1]"), (f"sys.path.insert(0, {str(TESTS)!r}); import conftest", "[0, 0]")]
)
def test_children_of_background_tests_get_default_signals(prepare, ignored):
    done = subprocess.run(
        [sys.executable, "-c", PARENT.format(prepare=prepare)],
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": "/usr/bin:/bin"},
        preexec_fn=ignore_signals,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == ignored


def test_system_started_in_the_background_gets_default_signals(tmp_path):
    before = [signal.getsignal(number) for number in IGNORED]
    ignore_signals()
    try:
        system = System.launch(tmp_path, prefix=(sys.executable, "-c", CHILD))
    finally:
        for number, handler in zip(IGNORED, before, strict=True):
            signal.signal(number, handler)
    assert system.process.wait(60) == 0
    assert (tmp_path / "up.out").read_text() == "[0, 0]\n"
