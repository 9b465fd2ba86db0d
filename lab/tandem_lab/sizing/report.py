"""What `tandem size` prints: a table of fleets, a summary, and the ModelService that serves as it was simulated."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from tandem_lab.sizing.load import Objectives
from tandem_lab.sizing.search import Fleet, Score

HEADER = ("GPUS", "PRICE/H", "WORKERS", "TP", "CHUNK", "RUNNING", "ATTAINMENT", "TTFT", "ITL", "RETRACTIONS")


def table(fleets: Sequence[Fleet], *, price: float) -> str:
    """One line for each fleet; times at the percentile asked for."""
    rows = [HEADER, *(_row(fleet, price) for fleet in fleets)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(fleet: Fleet, price: float) -> tuple[str, ...]:
    return (
        str(fleet.gpus),
        f"{fleet.gpus * price:.2f}",
        f"{fleet.prefill}P + {fleet.decode}D",
        str(fleet.cell.rates.gpus),
        str(fleet.cell.chunk_tokens),
        str(fleet.cell.running),
        f"{fleet.score.attainment:.4f}",
        f"{fleet.score.ttft_s:.2f} s",
        f"{fleet.score.itl_s * 1e3:.1f} ms",
        str(fleet.score.retractions),
    )


def summary(fleet: Fleet, wanted: Objectives, proof: Score, *, price: float, trace: str, rate: float) -> str:
    """For the terminal, and as comments of the manifest. `rate`: of the load sized for, over that of the half."""
    rates = fleet.cell.rates
    source = "measured rates" if rates.measured else "an ESTIMATE from model and device: measure a worker to be sure"
    return "\n".join(
        (
            f"tandem size: {fleet.prefill} prefill and {fleet.decode} decode workers of {rates.gpus} GPUs, "
            f"{fleet.gpus * price:.2f} per hour, by {source}",
            f"asked: TTFT {wanted.ttft_s:g} s and ITL {wanted.itl_s * 1e3:g} ms for {wanted.percentile:.1%}",
            f"first half of {trace}, at {rate:.2f} times its rate: {fleet.score.attainment:.2%} met both; second half, "
            f"not used for sizing: {proof.attainment:.2%}",
        )
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceNames:
    """What the manifest says of the model."""

    name: str
    """Of the resource."""
    source: Mapping[str, object]
    """`spec.model`."""


def manifest(fleet: Fleet, wanted: Objectives, names: ServiceNames, *, context_length: int) -> dict[str, object]:
    """Workers as simulated to begin with; the autoscaler may go from half of them to twice as many."""
    return {
        "apiVersion": "tandem.dev/v1beta1",
        "kind": "ModelService",
        "metadata": {"name": names.name},
        "spec": {
            "model": dict(names.source),
            "slo": {
                "ttftSeconds": wanted.ttft_s,
                "itlSeconds": wanted.itl_s,
                "percentile": wanted.percentile,
                "admission": "observe",
            },
            "engine": {
                "device": "cuda",
                "contextLength": context_length,
                "tensorParallelSize": fleet.cell.rates.gpus,
                "chunkedPrefillSize": fleet.cell.chunk_tokens,
                "maxPrefillTokens": fleet.cell.chunk_tokens,
                "maxRunningRequests": fleet.cell.running,
            },
            "prefill": _role(fleet.prefill, fleet.cell.rates.gpus),
            "decode": _role(fleet.decode, fleet.cell.rates.gpus),
            "autoscaling": {"mode": "internal", "gpuBudget": 2 * fleet.gpus},
        },
    }


def _role(workers: int, gpus: int) -> dict[str, object]:
    return {
        "replicas": workers,
        "scaling": {"minReplicas": math.ceil(workers / 2), "maxReplicas": 2 * workers},
        "resources": {"limits": {"nvidia.com/gpu": str(gpus)}},
    }


def as_yaml(document: Mapping[str, object], comments: str) -> str:
    """`comments` first, each line behind a #."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in comments.splitlines())
    return head + yaml.safe_dump(document, sort_keys=False)
