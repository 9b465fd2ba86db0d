"""What an engine on a GPU needs installed: no numba, which only kernels for a CPU are compiled by."""

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
