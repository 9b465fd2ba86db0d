"""Tests of the device, each with a line as soon as it ends; those that have one are not run again.

`exact` are attention and the engine, `rest` are kernels and digests. With pytest-xdist several processes share the
device, but for tests marked `gpu_alone`, which measure its memory.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from gpu.control.bench import Bench
from gpu.control.lines import Check
from gpu.kit.pins import ROOT

FILES = {
    "exact": (
        ("test_gpu_families.py", False),
        ("test_gpu_engine.py", False),
        ("test_gpu_attention.py", False),
        ("test_gpu_engine.py", True),
    ),
    "rest": (("test_gpu_kernels.py", False), ("test_gpu_digests.py", False)),
}
"""And whether of a file those that have the device alone, or the others."""
PROCESSES = 6
GRACE_S = 5.0
MARKERS = "gpu: needs a CUDA device\ngpu_alone: measures the device's memory, or fills it\nslow: takes seconds"
INTERRUPTED, NO_TESTS = 2, 5
"""Statuses of pytest; 0 and 1 are tests that passed and failed."""


def run(bench: Bench, group: str) -> None:
    for file, alone in FILES[group]:
        _file(bench, ROOT / "tests" / "gpu" / file, alone=alone)


def _file(bench: Bench, file: Path, *, alone: bool) -> None:
    """In a separate process: after an illegal access a process can do nothing more with its device."""
    record = bench.record
    name = f"{file.name}, {'alone' if alone else 'together'}"
    if not record.wants(name, needs_s=20):
        return
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as done:
        done.write("\n".join(_done(bench)))
        done.flush()
        environment = {**os.environ, "GPU_LINES_OUT": str(bench.folder), "GPU_LINES_PART": record.part}
        environment["GPU_LINES_DONE"] = done.name
        try:
            status = subprocess.run(
                _command(file, alone=alone),
                cwd=ROOT,
                env=environment,
                check=False,
                timeout=max(1.0, record.left_s - GRACE_S),
            ).returncode
        except subprocess.TimeoutExpired:
            record.postponed.append(name)
            return
    if status in (0, 1, NO_TESTS):
        record.case(name, lambda: None, needs_s=0)
    else:
        record.missing(name, f"pytest ended with status {status}")


def _done(bench: Bench) -> set[str]:
    return {line.case for line in _checks(bench) if line.part == bench.record.part}


def _checks(bench: Bench) -> Sequence[Check]:
    return [line for line in bench.record.lines.read() if isinstance(line, Check)]


def _command(file: Path, *, alone: bool) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(ROOT), "-q", "-ra"]
    # Not the configuration of all tests: it needs plug-ins that these do not.
    command += ["-p", "no:cacheprovider", "-p", "gpu.parts.pytest_lines", "--import-mode=importlib", "--noconftest"]
    command += ["-o", f"markers={MARKERS}", "-m", "gpu_alone" if alone else "not gpu_alone"]
    if find_spec("pytest_timeout"):
        command += ["--timeout", "120"]
    if find_spec("xdist") and not alone:
        command += ["-n", str(min(PROCESSES, os.cpu_count() or 1)), "--dist", "loadgroup"]
    return [*command, str(file)]
