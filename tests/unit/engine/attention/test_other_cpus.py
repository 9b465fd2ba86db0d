"""Kernels of a CPU are right where there are narrower vectors, and where nothing is known of the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
AS_CPU = str(ROOT / "tools" / "as_cpu.sh")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="pretends to be another x86 CPU"),
]


@pytest.mark.parametrize(
    ("kind", "capability", "checks"),
    [("avx2", "AVX2", ("products", "attention")), ("portable", "DEFAULT", ("products",))],
)
def test_kernels_agree_as_on_another_cpu(kind, capability, checks):
    done = subprocess.run(
        [AS_CPU, kind, sys.executable, "-m", "tandem_testing.other_cpu", *checks],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{', '.join(checks)} agree on {capability}"


def test_a_cpu_that_nobody_knows_is_refused():
    done = subprocess.run([AS_CPU, "sse9", "true"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (2, "as_cpu: sse9 is none of avx2, portable")
