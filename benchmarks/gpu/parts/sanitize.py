"""NVIDIA's memcheck and racecheck on a small engine."""

import os
import subprocess
import sys
from functools import partial

from gpu.control.bench import Bench
from gpu.control.lines import Check
from gpu.control.needs import find_tool

TOOLS = ("memcheck", "racecheck")
NEEDS_S = 60.0
FOUND = 9
"""Exit status of the tool when it has found something."""
MAX_SHOWN = 3000


def run(bench: Bench) -> None:
    for tool in TOOLS:
        bench.record.case(tool, partial(_sanitized, bench, tool), needs_s=5.0 if bench.tiny else NEEDS_S)


def _sanitized(bench: Bench, tool: str) -> None:
    """Without torch's cache of memory, which hides where a tensor ends."""
    device, dtype = ("cpu", "float32") if bench.tiny else ("cuda:0", "bfloat16")
    command = [sys.executable, "-m", "gpu.parts.tiny_run", "--device", device, "--dtype", dtype]
    sanitizer = find_tool("compute-sanitizer")
    if sanitizer and not bench.tiny:
        options = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
        command = [sanitizer, *options, *command]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=max(1.0, bench.record.left_s),
        check=False,
    )
    print(done.stdout[-MAX_SHOWN:], flush=True)
    why = "" if done.returncode == 0 else f"status {done.returncode}: {done.stdout[-MAX_SHOWN:]}"
    outcome = "passed" if done.returncode == 0 else "failed"
    bench.record.write(Check(part=bench.record.part, case=tool, outcome=outcome, why=why))
