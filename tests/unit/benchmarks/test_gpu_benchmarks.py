"""The arithmetic behind the figures of `benchmarks/gpu`, which needs no device."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tandem_engine.model.checkpoint import parse_config
from tandem_engine.model.directory import open_directory
from tandem_engine.model.tensor_names import expected_shapes

BENCHMARKS = str(Path(__file__).resolve().parents[3] / "benchmarks")


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


def span(ts, dur, cat="kernel"):
    return {"ts": ts, "dur": dur, "cat": cat}


@pytest.mark.parametrize(
    ("events", "idle"),
    [
        ([span(0, 100)], 0.0),
        ([span(0, 40), span(60, 40)], 20 / 50),
        ([span(0, 45), span(20, 20), span(45, 5), span(50, 50)], 0.0),
        ([span(0, 40), span(60, 40), span(40, 20, "cpu_op")], 20 / 50),
        ([span(0, 40), span(60, 40), span(40, 10, "gpu_memcpy")], 10 / 50),
        ([span(0, 10), span(90, 10)], 1.0),
    ],
)
def test_idle_share_is_of_the_middle_half_of_a_trace(events, idle):
    from gpu.engine import idle_share

    assert idle_share(events) == pytest.approx(idle)


def test_a_trace_without_a_device_is_refused():
    from gpu.engine import idle_share

    with pytest.raises(AssertionError, match="no event of a device"):
        idle_share([span(0, 10, "cpu_op")])


@pytest.mark.parametrize("name", ["0.6B", "8B", "tiny"])
def test_parameters_are_those_of_the_models_matrices(tmp_path, name):
    from gpu.shapes import SHAPES

    shape = SHAPES[name]
    config = parse_config(open_directory(shape.write(tmp_path)))
    matrices = {name: size for name, size in expected_shapes(config).items() if len(size) == 2}
    embedding = 0 if config.tie_embeddings else shape.head_parameters
    assert sum(torch.Size(size).numel() for size in matrices.values()) == (
        shape.body_parameters + shape.head_parameters + embedding
    )


def test_a_decode_step_reads_all_matrices_once_and_the_kv_of_every_sequence():
    from gpu.shapes import SHAPES

    shape = SHAPES["8B"]
    matrices = 2 * (shape.body_parameters + shape.head_parameters)
    assert shape.decode_bytes(32, 1000, 2) == matrices + 32 * 1000 * 128 * 1024


def test_targets_are_met_from_above_or_from_below():
    from gpu.figures import Figure

    assert Figure(name="", ratio=0.9, of="", target=0.85).met
    assert not Figure(name="", ratio=0.8, of="", target=0.85).met
    assert Figure(name="", ratio=0.01, of="", target=0.02, at_most=True).met
    assert Figure(name="", ratio=1.0, of="").met is None


def test_a_report_lists_targets_and_what_is_missing():
    from gpu.figures import Figure, Report

    report = Report(machine={"device": "X"}, missing=["kernels: 5 s needed, 1 s left"])
    report.figures = [Figure(name="a", ratio=0.9, of="b", target=0.85), Figure(name="c", ratio=2.0, of="d")]
    told = json.loads(report.json())
    assert told["targets"] == [{"name": "a", "ratio": 0.9, "target": 0.85, "at_most": False}]
    assert told["missing"] == report.missing
    assert "| a | 0.9 | b | ≥ 0.85 | met |" in report.table()


def test_what_no_longer_fits_is_remembered():
    from gpu.budget import Budget

    budget = Budget(seconds=30.0)
    assert budget.allows("short", needs_s=1)
    assert not budget.allows("long", needs_s=60)
    assert budget.skipped[0].startswith("long: about 60 s needed")


def test_without_a_device_it_says_so_and_measures_nothing(monkeypatch, capsys):
    from gpu.__main__ import NO_DEVICE, main

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 0
    assert capsys.readouterr().out.strip() == NO_DEVICE


def test_an_unknown_section_is_refused(capsys):
    from gpu.__main__ import main

    with pytest.raises(SystemExit):
        main(["--only", "kernel"])
    assert "must name some of kernels, engine, handoff" in capsys.readouterr().err


def teardown_module():
    for name in [name for name in sys.modules if name == "gpu" or name.startswith("gpu.")]:
        del sys.modules[name]
