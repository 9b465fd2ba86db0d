"""examples/cuda-ipc/deployment.yaml: two workers on two GPUs in one PID namespace, which is what cuda_ipc requires."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem_services.cli.main import build_parser
from tandem_services.cli.serve import choose_workers
from tandem_testing.pod_security import violations

EXAMPLE = Path(__file__).parents[4] / "examples/cuda-ipc/deployment.yaml"


@pytest.fixture
def template() -> dict[str, Any]:
    return yaml.safe_load(EXAMPLE.read_text("utf-8"))["spec"]["template"]


@pytest.fixture
def worker(template) -> dict[str, Any]:
    """The container that the workers are in."""
    (found,) = (one for one in template["spec"]["containers"] if one["name"] == "tandem")
    return found


def test_cuda_ipc_example_is_admitted_as_restricted(template):
    assert violations(template) == []


def test_workers_of_example_are_on_a_gpu_each(worker):
    args = build_parser().parse_args(worker["args"])
    gpus = int(worker["resources"]["limits"]["nvidia.com/gpu"])
    choose_workers(args, gpus=gpus)
    assert (args.prefill, args.decode, args.both) == (1, 1, 0)
    assert args.devices == ("cuda:0", "cuda:1")


def test_example_allows_cuda_ipc_and_nothing_between_hosts(worker):
    (transports,) = (one["value"] for one in worker["env"] if one["name"] == "UCX_TLS")
    assert {"cuda_ipc", "cuda_copy"} <= set(transports.split(",")) <= {"cuda_ipc", "cuda_copy", "sm", "self"}
