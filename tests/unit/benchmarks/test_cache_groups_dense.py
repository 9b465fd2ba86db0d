"""What `benchmarks/cache_groups.py` starts in other processes exists."""

import importlib

from tandem_lab.__main__ import build_parser
from tandem_testing.benchmark_modules import benchmarks_importable


def test_dense_case_starts_a_command_of_this_checkout(tmp_path):
    with benchmarks_importable():
        cache_groups = importlib.import_module("cache_groups")
    module, command = cache_groups.offline_module(cache_groups.ROOT)
    assert module == "tandem_lab"
    arguments = build_parser().parse_args([command, *cache_groups.OFFLINE, "--model", str(tmp_path)])
    assert arguments.skip_reference
    assert cache_groups.offline_module(tmp_path) == ("tandem_engine.cli", "bench")
