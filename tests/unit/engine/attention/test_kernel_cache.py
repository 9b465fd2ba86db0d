"""Kernels are compiled once for a machine, not at every start."""

import os
import subprocess
import sys

import pytest

OF_A_PIECE = """
from numba.core import types
from tandem_engine.kernels.cpu.pieces import compiled_callback, inlined

def build(number):
    @inlined
    def piece(x):
        return x + number

    def kernel(x):
        return piece(x) * number

    return compiled_callback(kernel, types.float32(types.float32))

print(*(build(number).cache_hits for number in (3, 4)))
"""
OF_PAGES = """
import numpy as np
from tandem_engine.kernels.cpu.paged_attention import build_paged_kernel

print(build_paged_kernel(np.dtype(np.float32), 16, 1, capped=False).cache_hits)
"""


@pytest.mark.parametrize(("source", "kernels"), [(OF_A_PIECE, 2), (OF_PAGES, 1)], ids=["of a piece", "of pages"])
def test_a_kernel_made_of_compiled_functions_is_found_by_the_next_process(tmp_path, source, kernels):
    """Each was compiled at every start, for numba took the functions that it closes over for others."""
    (tmp_path / "kernel.py").write_text(source)
    assert hits(tmp_path) == [0] * kernels
    assert hits(tmp_path) == [1] * kernels


def test_kernels_of_one_function_have_files_of_their_own(tmp_path):
    """Two processes that wrote at the same time gave theirs the same number: one ran the other's code."""
    (tmp_path / "kernel.py").write_text(OF_A_PIECE)
    hits(tmp_path)
    assert len([*(tmp_path / "cache").rglob("*.nbi")]) == 2


def hits(folder) -> list[int]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_CACHE_DIR": str(folder / "cache")}
    run = subprocess.run(
        [sys.executable, str(folder / "kernel.py")], env=env, check=True, capture_output=True, text=True, timeout=200
    )
    return [int(word) for word in run.stdout.split()]
