"""The Triton kernels of digests, without a device: interpreted against the CPU's loops, and compiled for sm_90.

Triton comes with torch for CUDA; beside torch for CPUs it is worth 200 MB to those alone who change the kernels.
"""

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="digest kernels NOT tested: Triton is not installed; pip install 'triton>=3.6,<4' to test them on a CPU",
    ),
]


def run(*arguments: str, interpreted: bool) -> None:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1" if interpreted else "0"}
    command = [sys.executable, "-m", "tandem_testing.triton_digests", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_interpreted_kernels_equal_the_compiled_loops():
    run("agree", interpreted=True)


def test_kernels_compile_for_hopper_without_a_device(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    run("compile", interpreted=False)
