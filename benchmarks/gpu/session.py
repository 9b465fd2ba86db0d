"""One run: ceilings, then the sections that were asked for, as far as there is time."""

import argparse
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from gpu import engine, kernel_cases
from gpu.budget import Budget
from gpu.ceilings import measure
from gpu.engine import EngineRun
from gpu.figures import Report
from gpu.handoff import measure_handoff
from gpu.kernels import measure_kernels
from gpu.quantized_cases import QuantizedCases
from gpu.shapes import SHAPES
from gpu.stopwatch import Stopwatch


def run(args: argparse.Namespace) -> Report:
    """All sections that were asked for, as far as there is time."""
    device = torch.device("cpu" if args.dry_run else "cuda")
    dtype = torch.float32 if args.dry_run else torch.bfloat16
    shape = SHAPES["tiny" if args.dry_run else args.model]
    budget, watch = Budget(seconds=args.minutes * 60), Stopwatch(device)
    ceilings = measure(watch, dtype, tiny=args.dry_run)
    report = Report(
        machine=machine(device),
        ceilings={"copy GB/s": ceilings.copy_bytes_per_s / 1e9, "matmul TFLOP/s": ceilings.matmul_flops / 1e12},
    )
    if "kernels" in args.only:
        sizes = kernel_cases.TINY if args.dry_run else kernel_cases.Sizes()
        maker = kernel_cases.CaseMaker(shape=shape, sizes=sizes, device=device, dtype=dtype)
        measure_kernels(report, watch, maker, ceilings, budget)
        quantized = QuantizedCases(shape=shape, sizes=sizes, device=device, dtype=dtype)
        measure_kernels(report, watch, quantized, ceilings, budget)
    loads = engine.TINY if args.dry_run else engine.Loads()
    told = EngineRun(shape=shape, loads=loads, ceilings=ceilings, dtype=dtype, report=report, budget=budget)
    mixed = None
    if "engine" in args.only:
        with report.attempt("engine"):
            mixed = told.measure(str(device))
    if "handoff" in args.only and not args.dry_run:
        with report.attempt("handoff"):
            measure_handoff(report, shape, ceilings, budget, str(device))
    if mixed is not None:
        with report.attempt("transformers"):
            told.compare(mixed, str(device))
    report.missing += budget.skipped
    return report


def machine(device: torch.device) -> dict[str, str]:
    """Where and with what a run took place."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
        "device": name,
        "python": platform.python_version(),
        **{package: _version(package) for package in ("torch", "triton", "transformers", "nixl")},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _commit() -> str:
    root = Path(__file__).parent
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
