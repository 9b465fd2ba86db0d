"""Cases that `make test` leaves to `make test-long`: how they are marked, and the list of them."""

import re
from pathlib import Path

import pytest

from tandem_testing.long_tests import long_except
from tandem_testing.triton_kernels.checks import COMPILED, INTERPRETED, KernelChecks

ROOT = Path(__file__).resolve().parents[2]
KERNELS = "tests/support/tandem_testing/triton_kernels"
MARKED = re.compile(r"mark\.long\(|long_except\(|^def compile_\w+\(arch: int\)", re.MULTILINE)
ROW = re.compile(r"^\| `(tests/\S+)` \|", re.MULTILINE)


def files_with_long_cases() -> set[str]:
    """The modules of checks of kernels are one entry."""
    files = [
        *(ROOT / "tests").rglob("test_*.py"),
        *(ROOT / KERNELS).glob("*.py"),
    ]
    found = {str(file.relative_to(ROOT)) for file in files if MARKED.search(file.read_text("utf-8"))}
    return {KERNELS if file.startswith(KERNELS) else file for file in found} - {"tests/unit/test_long_tests.py"}


def test_readme_of_the_tests_lists_each_file_with_long_cases() -> None:
    listed = ROW.findall((ROOT / "tests/README.md").read_text("utf-8"))
    assert sorted(listed) == sorted(files_with_long_cases())


def test_cases_that_are_not_kept_are_marked_with_the_reason() -> None:
    first, other = long_except((1, 2), {1}, why="as 1")
    assert (first, other.values) == (1, (2,))
    assert [(mark.name, mark.args) for mark in other.marks] == [("long", ("as 1",))]


def test_kept_case_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no cases: \[3\]"):
        long_except((1, 2), {1, 3}, why="as 1")


def test_checks_of_kernels_are_for_one_architecture_or_long() -> None:
    checks = KernelChecks("tandem_testing.triton_kernels.decode_attention")
    each, long = checks.names(COMPILED, long=False), checks.names(COMPILED, long=True)
    assert "compile_for_llama_8b for sm_90" in each
    assert "compile_for_float8_pages" in each
    assert "compile_for_llama_8b for sm_80" in long
    assert checks.names(INTERPRETED, long=True) == []
