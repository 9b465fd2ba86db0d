"""One run: ceilings, then the sections that were asked for, as far as there is time."""

import argparse
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from gpu import cases, engine
from gpu.attention_cases import AttentionCases
from gpu.budget import Budget
from gpu.ceilings import Ceilings, measure
from gpu.engine import EngineRun
from gpu.figures import Report
from gpu.handoff import measure_handoff
from gpu.kernels import measure_kernels
from gpu.layer_cases import LayerCases
from gpu.quantized_cases import QuantizedCases
from gpu.shapes import SHAPES, Shape
from gpu.stopwatch import Stopwatch
from gpu.table_cases import TableCases

KINDS = (AttentionCases, LayerCases, TableCases, QuantizedCases)
ENGINE_S = 30.0
"""Least time in which an engine is built and says anything."""


def run(args: argparse.Namespace) -> Report:
    """All sections that were asked for, model after model, as far as there is time."""
    device = torch.device("cpu" if args.dry_run else "cuda")
    dtype = torch.float32 if args.dry_run else torch.bfloat16
    budget, watch = Budget(seconds=args.minutes * 60), Stopwatch(device)
    ceilings = measure(watch, dtype, tiny=args.dry_run)
    report = Report(
        machine=machine(device),
        ceilings={"copy GB/s": ceilings.copy_bytes_per_s / 1e9, "matmul TFLOP/s": ceilings.matmul_flops / 1e12},
    )
    one = OfOneModel(
        sections=args.only, tiny=args.dry_run, dtype=dtype, watch=watch, ceilings=ceilings, report=report, budget=budget
    )
    for name in ("tiny",) if args.dry_run else args.model:
        one.measure(SHAPES[name])
    report.missing += budget.skipped
    return report


@dataclass(frozen=True, kw_only=True, slots=True)
class OfOneModel:
    """What is measured of each model."""

    sections: Sequence[str]
    tiny: bool
    dtype: torch.dtype
    watch: Stopwatch
    ceilings: Ceilings
    report: Report
    budget: Budget

    def measure(self, shape: Shape) -> None:
        device = self.watch.device
        if "kernels" in self.sections:
            self._kernels(shape)
        loads = engine.TINY if self.tiny else engine.Loads()
        told = EngineRun(
            shape=shape, loads=loads, ceilings=self.ceilings, dtype=self.dtype, report=self.report, budget=self.budget
        )
        mixed = None
        if "engine" in self.sections and self.budget.allows(f"engine, {shape.name}", needs_s=ENGINE_S):
            with self.report.attempt(f"engine, {shape.name}"):
                mixed = told.measure(str(device))
        if "handoff" in self.sections and not self.tiny:
            with self.report.attempt(f"handoff, {shape.name}"):
                measure_handoff(self.report, shape, self.ceilings, self.budget, str(device))
        if mixed is not None:
            with self.report.attempt(f"transformers, {shape.name}"):
                told.compare(mixed, str(device))

    def _kernels(self, shape: Shape) -> None:
        sizes = cases.TINY if self.tiny else cases.Sizes()
        for kind in KINDS:
            maker = kind(shape=shape, sizes=sizes, device=self.watch.device, dtype=self.dtype)
            measure_kernels(self.report, self.watch, maker, self.ceilings, self.budget)


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
