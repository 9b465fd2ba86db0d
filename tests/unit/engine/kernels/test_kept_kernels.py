"""Compiled code is found by the next process, and is that of the types and arguments it was compiled for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tandem_engine.kernels import cpu

pytest.importorskip("numba")

OF_BUILDERS = """
import ctypes
from numba.core import types
from tandem_engine.kernels.cpu.kept import kept
from tandem_engine.kernels.cpu.pieces import compiled_callback, inlined

@kept
def build(number: int):
    @inlined
    def piece(x):
        return x + number

    def kernel(x):
        return piece(x) * number

    return compiled_callback(kernel, types.float32(types.float32))

call = ctypes.CFUNCTYPE(ctypes.c_float, ctypes.c_float)
print(*(build(number).stored for number in (3, 4)), *(call(build(number).address)(1.0) for number in (3, 4)))
"""
OF_FUNCTIONS = """
import numpy as np
from tandem_engine.kernels.cpu.jit import compiled

def halved(x, many):
    out = np.empty((2, many), np.float64)
    out[:] = x / 2
    return out, many

half = compiled(halved)
results = [half(3, 2)[0].tolist(), half(3.5, 1)[0].tolist()]
try:
    half(1, -1)
except ValueError as error:
    results.append(str(error))
print(sum(half.stats.cache_hits.values()), results)
"""
OF_PAGES = """
import numpy as np
from tandem_engine.kernels.cpu.paged_attention import build_paged_kernel

print(build_paged_kernel(np.dtype(np.float32), 16, 1, capped=False).stored)
"""


def run_in(folder: Path, source: str, **environment: str) -> str:
    (folder / "kernel.py").write_text(source)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder / "copy"), *sys.path]),
        "TANDEM_CACHE_DIR": str(folder / "cache"),
        **environment,
    }
    run = subprocess.run(
        [sys.executable, str(folder / "kernel.py")], env=env, check=True, capture_output=True, text=True, timeout=200
    )
    return run.stdout.strip()


def kernels_in(folder: Path) -> set[str]:
    return {path.name for path in (folder / "cache" / "kernels").glob("*.kernel")}


@pytest.mark.parametrize(
    ("source", "first", "second"),
    [
        (OF_BUILDERS, "False False 12.0 20.0", "True True 12.0 20.0"),
        (
            OF_FUNCTIONS,
            "0 [[[1.5, 1.5], [1.5, 1.5]], [[1.75], [1.75]], 'negative dimensions not allowed']",
            "2 [[[1.5, 1.5], [1.5, 1.5]], [[1.75], [1.75]], 'negative dimensions not allowed']",
        ),
        (OF_PAGES, "False", "True"),
    ],
    ids=["builders", "functions", "pages"],
)
def test_code_is_found_by_the_next_process(tmp_path, source, first, second):
    assert run_in(tmp_path, source) == first
    assert run_in(tmp_path, source) == second


def test_code_of_other_source_or_another_target_is_not_found(tmp_path):
    run_in(tmp_path, OF_FUNCTIONS)
    known = kernels_in(tmp_path)
    assert len(known) == 2
    assert run_in(tmp_path, OF_FUNCTIONS.replace("x / 2", "x / 4")).startswith("0 [[[0.75")
    assert len(kernels_in(tmp_path)) == 4
    assert run_in(tmp_path, OF_FUNCTIONS, TANDEM_KERNEL_TARGET="native").startswith("0 ")
    assert run_in(tmp_path, OF_FUNCTIONS, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="").startswith("0 ")


MODULES = sorted(path.name for path in Path(cpu.__file__).parent.glob("*.py"))


def test_change_of_any_kernel_module_makes_other_keys(tmp_path):
    """Kernels are made of pieces of several files; a key that missed one would find code of old source."""
    from tandem_engine.kernels.cpu import kept

    assert "vectors.py" in MODULES
    folder = tmp_path / "cpu"
    shutil.copytree(Path(cpu.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    before = kept.digest_of_folder(folder)
    assert before == kept.SOURCES
    digests = {before}
    for name in MODULES:
        source = (folder / name).read_bytes()
        (folder / name).write_bytes(source + b"# edited\n")
        digests.add(kept.digest_of_folder(folder))
        (folder / name).write_bytes(source)
    assert len(digests) == 1 + len(MODULES)


def test_compiled_code_cannot_call_kept_functions():
    """They have no code that other code could be linked with."""
    import numba

    from tandem_engine.kernels.cpu.attention_work import cut_queries

    with pytest.raises(AssertionError, match="compiled code calls a piece"):
        cut_queries.get_call_template((), {})
    assert isinstance(cut_queries, numba.core.dispatcher.Dispatcher)
