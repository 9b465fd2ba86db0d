"""Each kernel as a share of the ceiling that bounds it, and as a multiple of its peers' speed.

A peer that fails is missing, and costs nobody else a figure.
"""

import torch

from gpu.budget import Budget
from gpu.cases import Case, CaseMaker
from gpu.ceilings import Ceilings
from gpu.figures import Figure, Report
from gpu.stopwatch import Stopwatch


@torch.inference_mode()
def measure_kernels(report: Report, watch: Stopwatch, maker: CaseMaker, ceilings: Ceilings, budget: Budget) -> None:
    for number, make in enumerate(maker.cases(), start=1):
        with report.attempt(f"{type(maker).__name__} {number}, {maker.shape.name}"):
            case = make()
            if budget.allows(f"{case.name}, {maker.shape.name}", needs_s=case.takes_s):
                _measure(report, case, watch, ceilings, maker.shape.name)


def _measure(report: Report, case: Case, watch: Stopwatch, ceilings: Ceilings, model: str) -> None:
    name = f"{case.name} ({model})"
    with report.attempt(f"{case.name}, {model}"):
        ours = watch.seconds(case.run)
        report.add(_share(case, ours, ceilings, name))
        for peer, run in case.peers.items():
            with report.attempt(f"{case.name}, {model}, {peer}"):
                theirs = watch.seconds(run)
                report.add(Figure(name=name, ratio=theirs / ours, of=f"speed of {peer}", facts={"us": theirs * 1e6}))


def _share(case: Case, seconds: float, ceilings: Ceilings, name: str) -> Figure:
    best = ceilings.copy_bytes_per_s if case.ceiling == "copy" else ceilings.matmul_flops
    facts = {"us": seconds * 1e6, "GB/s" if case.ceiling == "copy" else "TFLOP/s": case.work / seconds / _unit(case)}
    of = "copy bandwidth" if case.ceiling == "copy" else "matmul rate"
    return Figure(name=name, ratio=case.work / seconds / best, of=of, target=case.target, facts=facts)


def _unit(case: Case) -> float:
    return 1e9 if case.ceiling == "copy" else 1e12
