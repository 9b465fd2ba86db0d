import ast
import importlib
from pathlib import Path

import pytest
from numba.extending import is_jitted

from tandem_engine.kernels.cpu.attention_work import cut_queries, group_tasks, listed, shared_end
from tandem_engine.kernels.cpu.first_places import find_in_blocks
from tandem_engine.kernels.cpu.page_digests import full_digests, sampled_digests
from tandem_engine.kernels.cpu.page_runs import merge_runs


def names_from_elsewhere(kernel) -> set[str]:
    """Names of other modules that the code of a compiled function, or of one that it calls, takes in."""
    function = kernel.py_func
    source = ast.parse(Path(function.__code__.co_filename).read_text("utf-8"))
    ours = [n for n in ast.walk(source) if isinstance(n, ast.ImportFrom) and str(n.module).startswith("tandem_")]
    found = set(function.__code__.co_names) & {a.asname or a.name for n in ours for a in n.names}
    for name in function.__code__.co_names:
        called = function.__globals__.get(name)
        if name not in found and is_jitted(called):
            found |= names_from_elsewhere(called)
    return found


@pytest.mark.parametrize(
    "kernel", [cut_queries, shared_end, listed, group_tasks, sampled_digests, full_digests, merge_runs, find_in_blocks]
)
def test_code_that_is_kept_takes_nothing_from_other_files(kernel):
    """It is found again by its own file alone, and would compute with what the other one had before a change."""
    assert names_from_elsewhere(kernel) == set()


def test_code_that_takes_in_another_file_is_found_out(tmp_path, monkeypatch):
    (tmp_path / "user.py").write_text(
        "import numba\nfrom tandem_engine.kernels.cpu.attention_work import CHUNK\n\n"
        "@numba.njit\ndef inner(x):\n    return x * CHUNK\n\n@numba.njit\ndef outer(x):\n    return inner(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert names_from_elsewhere(importlib.import_module("user").outer) == {"CHUNK"}
