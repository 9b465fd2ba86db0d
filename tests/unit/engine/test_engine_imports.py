"""What an engine needs installed and imports: no numba on a GPU, whose kernels are not compiled by it, and nowhere
libraries that it does not use, because each one stays in the memory of every worker."""

import os
import subprocess
import sys

from tandem_testing.import_blocker import write_import_blocker

LOADED = """
import sys
import tandem_engine.engine, tandem_engine.engine.process, tandem_engine.executor.platform, tandem_lab.verify.command
import tandem_engine.disaggregation.nixl.transport
from tandem_engine.disaggregation.nixl.layout import Region, describe
here, there = Region(1000, 10, 9, "VRAM", 0), Region(5000, 10, 9, "VRAM", 1)
print(describe(here, [2, 3, 7], there, [4, 5, 6]).source[:, :2].tolist())
print(sorted({"numba", "nixl", "triton", "transformers"} & {*sys.modules}))
"""


def test_engine_is_imported_and_describes_pages_without_numba(tmp_path):
    folder = write_import_blocker(tmp_path / "site", "numba", "llvmlite")
    path = os.pathsep.join([str(folder), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", LOADED],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["[[1020, 20], [1070, 10]]", "[]"]


UNUSED = (
    *("transformers", "safetensors.torch", "huggingface_hub", "sympy", "networkx", "scipy", "pandas", "PIL", "triton"),
    *("torch._dynamo", "torch._inductor", "torch.onnx", "fastapi", "starlette", "uvicorn", "redis", "httpx"),
    *("prometheus_client", "opentelemetry", "kubernetes", "tandem_services", "tandem_lab"),
)
ON_A_CPU = """
import sys
import tandem_engine.engine.process, tandem_engine.disaggregation.nixl.transport
import tandem_engine.kernels.cpu.decoder_step, tandem_engine.kernels.cpu.gemm
print(*sorted({*sys.modules} & {*sys.argv[1:]}))
"""


def test_engine_on_cpu_imports_no_unused_library():
    run = subprocess.run([sys.executable, "-c", ON_A_CPU, *UNUSED], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
