"""The engine's process ends as soon as its work has."""

import subprocess
import sys

PROGRAM = """
import atexit, logging, sys
from tandem_engine.cli import exit_now
atexit.register(print, "destructors ran")
print("last words")
exit_now(3)
"""


def test_engine_exit_keeps_status_and_output_skips_destructors():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "last words\n")
