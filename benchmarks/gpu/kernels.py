"""Each kernel as a share of the ceiling that bounds it, and as a multiple of its peers' speed."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from gpu.budget import Budget
from gpu.ceilings import Ceilings
from gpu.figures import Figure, Report
from gpu.kernel_cases import Case
from gpu.shapes import Shape
from gpu.stopwatch import Stopwatch


class MakesCases(Protocol):
    """Of one model."""

    @property
    def shape(self) -> Shape: ...

    def cases(self) -> Iterator[Callable[[], Case]]:
        """What makes them. Each is made when it is measured and dropped after it."""
        ...


CASE_S = 5.0
"""About what one case and its peers take, with compiling."""


@torch.inference_mode()
def measure_kernels(report: Report, watch: Stopwatch, maker: MakesCases, ceilings: Ceilings, budget: Budget) -> None:
    for number, make in enumerate(maker.cases(), start=1):
        with report.attempt(f"{type(maker).__name__} {number}, {maker.shape.name}"):
            case = make()
            if budget.allows(f"{case.name}, {maker.shape.name}", needs_s=CASE_S):
                _measure(report, case, watch, ceilings, maker.shape.name)


def _measure(report: Report, case: Case, watch: Stopwatch, ceilings: Ceilings, model: str) -> None:
    with report.attempt(f"{case.name}, {model}"):
        for figure in _figures(case, watch, ceilings, model):
            report.add(figure)


def _figures(case: Case, watch: Stopwatch, ceilings: Ceilings, model: str) -> Iterator[Figure]:
    ours = watch.seconds(case.run)
    best = ceilings.copy_bytes_per_s if case.ceiling == "copy" else ceilings.matmul_flops
    facts = {"us": ours * 1e6, "GB/s" if case.ceiling == "copy" else "TFLOP/s": case.work / ours / _unit(case)}
    of = "copy bandwidth" if case.ceiling == "copy" else "matmul rate"
    name = f"{case.name} ({model})"
    yield Figure(name=name, ratio=case.work / ours / best, of=of, target=case.target, facts=facts)
    for peer, run in case.peers.items():
        theirs = watch.seconds(run)
        yield Figure(name=name, ratio=theirs / ours, of=f"speed of {peer}", facts={"us": theirs * 1e6})


def _unit(case: Case) -> float:
    return 1e9 if case.ceiling == "copy" else 1e12
