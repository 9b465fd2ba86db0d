"""The arithmetic behind the figures of `benchmarks/gpu`, which needs no device."""

import json
import os
import subprocess
import sys
import weakref
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


def span(ts, dur, cat="kernel", **args):
    return {"ts": ts, "dur": dur, "cat": cat, "args": args}


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
    from gpu.engine import idle_share, spans_of

    assert idle_share(spans_of(events)) == pytest.approx(idle)


def test_a_trace_without_a_device_is_refused():
    from gpu.engine import idle_share, spans_of

    with pytest.raises(AssertionError, match="no event of a device"):
        idle_share(spans_of([span(0, 10, "cpu_op")]))


def test_what_is_between_the_kernels_of_a_graph_is_no_wait_for_the_host():
    from gpu.engine import idle_share, launches_of, spans_of

    graph = [span(ts, 8, correlation=7) for ts in range(0, 50, 10)]
    alone = [span(60, 40, correlation=8), span(50, 10, "cpu_op", correlation=7)]
    assert sorted(launches_of([*graph, *alone])) == [(0, 48), (60, 100)]
    assert idle_share(launches_of([*graph, *alone])) == pytest.approx(12 / 50)
    assert idle_share(spans_of([*graph, *alone])) == pytest.approx((2 + 2 + 12) / 50)


def test_launches_that_are_not_told_apart_are_not_taken_for_one():
    from gpu.engine import launches_of

    for unknown in ({}, {"correlation": 0}):
        assert launches_of([span(0, 10, **unknown), span(90, 10, **unknown)]) == [(0, 10), (90, 100)]


def test_who_is_measured_after_the_engine_finds_its_memory_free(monkeypatch):
    """It holds most of the device until nobody knows it, closed or not."""
    from gpu import engine
    from gpu.budget import Budget
    from gpu.ceilings import Ceilings
    from gpu.figures import Report
    from gpu.shapes import SHAPES

    pools = []

    class Noted(engine.LLM):
        def __init__(self, *args, **options):
            super().__init__(*args, num_pages=64, threads=1, progress=False, **options)
            pools.append(weakref.ref(self._engine._parts.pool))

    monkeypatch.setattr(engine, "LLM", Noted)
    loads = engine.Loads(decode=(1,), idle=1, prompt=32, mixed=1, mixed_prompts=(4, 4), mixed_outputs=(2, 2))
    run = engine.EngineRun(
        shape=SHAPES["tiny"],
        loads=loads,
        ceilings=Ceilings(copy_bytes_per_s=1.0, matmul_flops=1.0),
        dtype=torch.float32,
        report=Report(machine={}),
        budget=Budget(seconds=0.0),
    )
    assert run.measure("cpu").seconds > 0
    assert [pool() for pool in pools] == [None]


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


def test_a_figure_is_told_at_once_and_what_raises_costs_itself_alone(capsys):
    from gpu.figures import Figure, Report

    report = Report(machine={})
    report.add(Figure(name="a", ratio=0.9, of="b"))
    assert "| a | 0.9 | b |" in capsys.readouterr().err
    with report.attempt("sampling"):
        raise RuntimeError("CUDA error\nmore of it")
    assert report.missing == ["sampling: RuntimeError: CUDA error"]
    assert report.failures == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_kernel_or_a_peer_that_fails_is_missing_and_the_others_are_not():
    pytest.importorskip("triton")
    from gpu.budget import Budget
    from gpu.cases import Case
    from gpu.ceilings import Ceilings
    from gpu.figures import Report
    from gpu.kernels import measure_kernels
    from gpu.shapes import SHAPES
    from gpu.stopwatch import Stopwatch

    def raises():
        raise torch.OutOfMemoryError("no room")

    class Cases:
        shape = SHAPES["tiny"]

        def cases(self):
            yield raises
            peers = {"first": raises, "second": lambda: None}
            for name, run in (("broken", raises), ("sound", lambda: None)):
                yield lambda name=name, run=run: Case(name=name, run=run, ceiling="copy", work=1.0, peers=peers)

    report = Report(machine={})
    watch = Stopwatch(torch.device("cpu"))
    measure_kernels(report, watch, Cases(), Ceilings(copy_bytes_per_s=1.0, matmul_flops=1.0), Budget(seconds=60.0))
    assert [(figure.name, figure.of) for figure in report.figures] == [
        ("sound (tiny)", "copy bandwidth"),
        ("sound (tiny)", "speed of second"),
    ]
    assert report.missing == [
        f"{what}: OutOfMemoryError: no room" for what in ("Cases 1, tiny", "broken, tiny", "sound, tiny, first")
    ]
    assert report.failures == 3


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


@pytest.mark.parametrize(("tests_pass", "benchmarks_run"), [(True, True), (False, True), (True, False)])
def test_make_gpu_measures_whatever_the_tests_say_and_fails_if_either_does(tmp_path, tests_pass, benchmarks_run):
    """With an interpreter that takes down what it is asked to run."""
    log, python = tmp_path / "log", tmp_path / "python"
    failing = [*([] if tests_pass else ["*test_gpu_digests*"]), *([] if benchmarks_run else ["-m\\ gpu*"])]
    cases = "".join(f"    {pattern}) exit 1 ;;\n" for pattern in failing)
    python.write_text(f'#!/bin/sh\necho "$*" >>{log}\ncase "$*" in\n    -c*) exit 0 ;;\n{cases}esac\n')
    python.chmod(0o755)
    done = subprocess.run(
        [str(Path(BENCHMARKS).parent / "tools/gpu.sh"), "--only", "kernels"],
        env={**os.environ, "TANDEM_PYTHON": str(python)},
        check=False,
    )
    assert done.returncode == (0 if tests_pass and benchmarks_run else 1)
    asked = [line for line in log.read_text().splitlines() if line.startswith("-m ")]
    files = sorted(path.name for path in (Path(BENCHMARKS).parent / "tests/gpu").glob("test_*.py"))
    assert [line.rpartition("/")[2] for line in asked[:-1]] == files
    assert asked[-1] == "-m gpu --only kernels"


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["--only", "kernel"], "must name some of kernels, engine, handoff"),
        (["--model", "8B,1B"], "must name some of 8B, 0.6B"),
    ],
)
def test_an_unknown_section_or_model_is_refused(argv, hint, capsys):
    from gpu.__main__ import main

    with pytest.raises(SystemExit):
        main(argv)
    assert hint in capsys.readouterr().err


def test_both_models_are_measured_the_larger_first_unless_one_is_named(monkeypatch):
    pytest.importorskip("triton")
    from gpu import session
    from gpu.__main__ import parser
    from gpu.ceilings import Ceilings

    measured = []
    monkeypatch.setattr(session, "Stopwatch", lambda _: None)
    monkeypatch.setattr(session, "measure", lambda *_, **__: Ceilings(copy_bytes_per_s=1.0, matmul_flops=1.0))
    monkeypatch.setattr(session, "machine", lambda _: {})
    monkeypatch.setattr(session.OfOneModel, "measure", lambda _, shape: measured.append(shape.name))
    for argv in ([], ["--model", "0.6B"]):
        session.run(parser().parse_args(argv))
    assert measured == ["Llama-3.1-8B", "Qwen3-0.6B", "Qwen3-0.6B"]


def teardown_module():
    for name in [name for name in sys.modules if name == "gpu" or name.startswith("gpu.")]:
        del sys.modules[name]
