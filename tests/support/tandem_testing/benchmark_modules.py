"""Benchmarks are scripts beside each other, in no package: their modules are found during their tests."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@contextmanager
def benchmarks_importable() -> Iterator[None]:
    """Modules of `benchmarks/` can be imported by their names."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield
    finally:
        sys.path.remove(str(BENCHMARKS))
