"""Cases that `make test-long` runs and `make test` does not: more of what the cases that remain also test.

    @pytest.mark.long("why the rest is enough for each change")           a test
    pytest.mark.parametrize("size", long_except(SIZES, {16}, why="…"))    all but one of its cases
    settings(max_examples=examples(30))                                   a property, with some times as many examples

`tests/README.md` lists the files with such cases, and what remains of them in `make test`.
"""

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

FACTOR = int(os.environ.get("TANDEM_EXAMPLES", "1"))
"""Examples of a property for each one of `make test`."""


def examples(count: int) -> int:
    """How many examples of a property to try, of which `make test` tries `count`."""
    return count * FACTOR


def long_except(cases: Iterable[Any], kept: Collection[Any], *, why: str) -> list[Any]:
    """Parameters of a test, of which those in `kept` run in `make test`. Raises `ValueError` if one of them is none."""
    found = list(cases)
    if unknown := [case for case in kept if case not in found]:
        raise ValueError(f"no cases: {unknown}")
    return [case if case in kept else pytest.param(case, marks=pytest.mark.long(why)) for case in found]
