"""Hardware counters of the attention kernels, by NVIDIA's ncu: counters.csv. Clocks stay as they are."""

import subprocess
import sys

from gpu.control.bench import Bench
from gpu.control.needs import find_tool

FILE = "counters.csv"
KERNELS = "regex:split_kernel|combine_kernel|extend_kernel"
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "Occupancy", "LaunchStats", "WarpStateStats", "SchedulerStats")
LAUNCHES = 10


def run(bench: Bench) -> None:
    bench.record.case("attention", lambda: _counted(bench), needs_s=5.0 if bench.tiny else 40.0)


def _counted(bench: Bench) -> None:
    command = [sys.executable, "-m", "gpu.parts.counted", *(["--dry-run"] if bench.tiny else [])]
    ncu = find_tool("ncu")
    if ncu and not bench.tiny:
        options = ["--clock-control", "none", "--kernel-name", KERNELS, "--launch-count", str(LAUNCHES), "--csv"]
        command = [ncu, *options, *(word for name in SECTIONS for word in ("--section", name)), *command]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, errors="replace", timeout=max(1.0, bench.record.left_s), check=False
    )
    if not bench.tiny:
        (bench.folder / FILE).write_text(done.stdout, "utf-8")
    if done.returncode != 0:
        last = [line for line in done.stdout.splitlines() if line.strip()] or ["it printed nothing"]
        raise RuntimeError(f"status {done.returncode}: {last[-1]}")
