"""Tests of `make e2e` need a cluster, so `make test` runs none of them. It imports them, so that none breaks unseen."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_end_to_end_tests_are_collected():
    # Without the options of this run: they may change what is printed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist", "tests/e2e"],
        cwd=ROOT,
        env=environment | {"TANDEM_E2E_KUBECONFIG": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_e2e_operator.py::" in done.stdout
