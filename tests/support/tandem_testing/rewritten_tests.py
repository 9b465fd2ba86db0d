"""Test files are rewritten once, not by each worker of pytest-xdist.

pytest rewrites the assertions of a test file when it imports it, and keeps the code beside the file. In a clean
checkout all workers import the same file at the same time, so each one rewrites them all. Here a worker rewrites its
share before it collects, and finds the shares of the others beside the files.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import (
    PYC_TAIL,
    _read_pyc,
    _rewrite_test,
    _write_pyc,
    assertstate_key,
    get_cache_dir,
    try_makedirs,
)


def rewrite_share(config: pytest.Config, worker: int, workers: int) -> None:
    """Of the files that the command names. A file that no worker has rewritten is rewritten when it is imported."""
    if not sys.dont_write_bytecode:
        for file in sorted(_test_files(config))[worker::workers]:
            _rewrite(config, file)


def _test_files(config: pytest.Config) -> Iterable[Path]:
    for argument in config.args:
        path = config.invocation_params.dir / argument.partition("::")[0]
        yield from path.rglob("test_*.py") if path.is_dir() else [path]


def _rewrite(config: pytest.Config, file: Path) -> None:
    state, folder = config.stash[assertstate_key], get_cache_dir(file)
    kept = folder / (file.stem + PYC_TAIL)
    try:
        if try_makedirs(folder) and _read_pyc(file, kept) is None:
            source_stat, code = _rewrite_test(file, config)
            _write_pyc(state, code, source_stat, kept)
    except (OSError, SyntaxError) as error:
        state.trace(f"cannot rewrite {file}: {error}")  # its import says so
