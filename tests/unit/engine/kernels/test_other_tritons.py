"""Kernels compiled by other versions of Triton than that of the environment: nothing spills, and loads are ahead."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem_testing.triton_kernels.checks import COMPILED, KernelChecks

HOME = Path(os.environ.get("TANDEM_TRITONS_HOME", Path.home() / ".cache" / "tandem-tritons"))
IMAGE = Path(__file__).parents[4] / "docker" / "constraints-cuda.txt"
REQUIRED = "TANDEM_TRITONS_REQUIRED"
"""In the environment: a version that is missing is a failure."""
MODULES = (
    "decode_attention",
    "extend_attention",
    "latent_attention",
    "expert_kernels",
    "quantized_kernels",
    "quantized_expert_kernels",
    "gpt_oss_kernels",
    "delta_step",
    "delta_runs",
    "layer_kernels",
    "sampling_kernels",
    "table_kernels",
    "work_list",
    "digests",
)
LIMIT_S = 900.0


def image_version() -> str:
    """Of the CUDA image."""
    lines = IMAGE.read_text("utf-8").splitlines()
    (found,) = (line.removeprefix("triton==") for line in lines if line.startswith("triton=="))
    return found


VERSIONS = ("3.6.0", image_version())
"""That of torch 2.11, and that of the image."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S)]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("module", MODULES)
def test_kernels_compile_by_another_triton(module, version):
    site = HOME / version
    if not (site / "triton").is_dir():
        assert not os.environ.get(REQUIRED), f"{site} has no Triton: run tools/tritons.sh"
        pytest.skip("needs other versions of Triton: make test-tritons")
    name = f"tandem_testing.triton_kernels.{module}"
    command = [sys.executable, "-m", "tandem_testing.triton_kernels.child", name, COMPILED]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), *(entry for entry in sys.path if entry)]),
        "TRITON_CACHE_DIR": str(HOME / f"cache-{version}"),
        "TRITON_INTERPRET": "0",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    outcomes = {line["check"]: line["failure"] for line in lines}
    expected = KernelChecks(name).names(COMPILED, long=False)
    assert list(outcomes) == expected, done.stderr
    assert outcomes == dict.fromkeys(expected)
