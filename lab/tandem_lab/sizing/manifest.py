"""The ModelService that serves as it was simulated, in the fields of the CRD."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from tandem_lab.sizing.load import Objectives
from tandem_lab.sizing.search import Fleet


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
