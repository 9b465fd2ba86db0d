"""Kernels of a CPU are right where there are narrower vectors, and where nothing is known of the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[4]
AS_CPU = str(ROOT / "tools" / "as_cpu.sh")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # compiles the first time, beside others that do
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="pretends to be another x86 CPU"),
]


NEEDS_AVX2 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="nothing makes a CPU wider than it is"
)


@pytest.mark.parametrize(
    ("kind", "capability", "checks"),
    [
        pytest.param("avx2", "AVX2", ("products", "attention"), marks=NEEDS_AVX2),
        ("portable", "DEFAULT", ("products",)),
    ],
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


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this CPU has no AVX-512")
def test_kernels_agree_without_the_instruction_for_pairs():
    done = subprocess.run(
        [sys.executable, "-m", "tandem_testing.other_cpu", "products"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
            "TANDEM_KERNEL_TARGET": "x86-64-v4",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "products agree on AVX512"


def test_as_cpu_rejects_unknown_cpu():
    done = subprocess.run([AS_CPU, "sse9", "true"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (2, "as_cpu: sse9 is none of avx2, portable")
