"""The benchmark of the scheduler runs: every workload, on today's scheduler; and every benchmark can be imported."""

import importlib

import pytest

from tandem_testing.benchmark_modules import BENCHMARKS, benchmarks_importable


@pytest.mark.parametrize("workload", ["decode", "sampling", "logprobs", "mixed"])
def test_scheduler_cost_measures_every_phase(workload):
    with benchmarks_importable():
        scheduler_cost = importlib.import_module("scheduler_cost")
    costs = scheduler_cost.cost(workload, 2, measured_steps=4)
    assert set(costs) == {"total", *scheduler_cost.PHASES, "rest"}
    assert all(costs[phase] > 0 for phase in scheduler_cost.PHASES)


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_benchmark_can_be_imported(name):
    with benchmarks_importable():
        assert hasattr(importlib.import_module(name), "__doc__")
