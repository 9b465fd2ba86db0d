"""Each kernel as a share of the ceiling that bounds it, and as a multiple of its peers' speed.

A peer that fails is missing, and costs no other figure.
"""

from collections.abc import Callable
from functools import partial

import torch

from gpu import cases
from gpu.attention_cases import AttentionCases
from gpu.cases import Case, CaseMaker
from gpu.control.bench import Bench
from gpu.control.lines import Figure
from gpu.expert_cases import ExpertCases
from gpu.latent_cases import LatentCases
from gpu.layer_cases import LayerCases
from gpu.quantized_cases import QuantizedCases
from gpu.shapes import SHAPES
from gpu.table_cases import TableCases

KINDS: tuple[tuple[type[CaseMaker], str], ...] = (
    (ExpertCases, "30B-A3B"),
    (AttentionCases, "8B"),
    (LatentCases, "V3"),
    (LayerCases, "8B"),
    (TableCases, "8B"),
    (QuantizedCases, "8B"),
    (AttentionCases, "0.6B"),
)
"""What is measured, of which model, in the order of its worth."""
TINY_KINDS = tuple((kind, "tiny MoE" if kind is ExpertCases else "tiny") for kind, _ in KINDS[:-1])
NEEDS_S = 6.0
"""What a case takes, roughly, with its peers and all that is compiled for them."""


def run(bench: Bench) -> None:
    sizes = cases.TINY if bench.tiny else cases.Sizes()
    for kind, name in TINY_KINDS if bench.tiny else KINDS:
        measure_kernels(bench, kind(shape=SHAPES[name], sizes=sizes, device=bench.device, dtype=bench.dtype))


@torch.inference_mode()
def measure_kernels(bench: Bench, maker: CaseMaker) -> None:
    for make in maker.cases():
        name = f"{type(maker).__name__} {label(make)} ({maker.shape.name})"
        bench.record.case(name, partial(_measure, bench, make, maker.shape.name), needs_s=NEEDS_S)


def label(make: Callable[[], Case]) -> str:
    """What a case is known by before it is made."""
    if isinstance(make, partial):
        return " ".join([label(make.func), *map(str, make.args)])
    return str(make.__name__).strip("_")  # type: ignore[attr-defined]


def _measure(bench: Bench, make: Callable[[], Case], model: str) -> None:
    case = make()
    name = f"{case.name} ({model})"
    ours = bench.watch.timing(case.run)
    best = bench.ceilings.copy_bytes_per_s if case.ceiling == "copy" else bench.ceilings.matmul_flops
    bench.record.add(
        Figure(
            name=name,
            ratio=case.work / ours.seconds / best,
            of="copy bandwidth" if case.ceiling == "copy" else "matmul rate",
            target=case.target,
            spread=ours.spread,
            facts={"us": ours.seconds * 1e6, _unit(case): case.work / ours.seconds / _size(case), **case.facts},
        )
    )
    for peer, run_peer in case.peers.items():
        with bench.record.attempt(f"{name}, {peer}"):
            theirs = bench.watch.timing(run_peer)
            facts = {"us": theirs.seconds * 1e6}
            ratio = theirs.seconds / ours.seconds
            bench.record.add(Figure(name=name, ratio=ratio, of=f"speed of {peer}", spread=theirs.spread, facts=facts))


def _unit(case: Case) -> str:
    return "GB/s" if case.ceiling == "copy" else "TFLOP/s"


def _size(case: Case) -> float:
    return 1e9 if case.ceiling == "copy" else 1e12
