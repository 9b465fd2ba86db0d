"""The table of a GPU run."""

import json

import pytest

from tandem_testing.benchmark_modules import benchmarks_importable

with benchmarks_importable():
    from gpu import __main__ as command
    from gpu.control.lines import Begin, Ceilings, Check, End, Figure, LineFile, Machine, Measured, Missing
    from gpu.control.report import Report
    from gpu.control.state import PartState, State, Status


@pytest.fixture
def run(tmp_path):
    """A folder with one good part."""
    write(
        tmp_path,
        Machine(part="kernels", facts={"date": "2026-11-27", "device": "X"}),
        Ceilings(part="kernels", when="before", copy_gb_s=4000.0, matmul_tflops=790.0),
        Begin(part="kernels", case="a"),
        Measured(part="kernels", case="a", figure=Figure(name="attention", ratio=0.9, of="copy", target=0.85)),
        End(part="kernels", case="a", seconds=1.0),
    )
    State(parts={"kernels": PartState(status=Status.DONE, seconds=12.5)}).write(tmp_path)
    return tmp_path


def write(folder, *lines):
    for line in lines:
        LineFile(folder).write(line)


def ceilings(copy_gb_s):
    return Ceilings(part="kernels", when="after", copy_gb_s=copy_gb_s, matmul_tflops=790.0)


def test_figure_has_its_share_its_target_and_a_verdict(run, capsys):
    assert command.main(["report", str(run)]) == 0
    table = capsys.readouterr().out
    assert "| attention | 0.9 | copy | ≥ 0.85 | met |" in table
    assert "| kernels | done | 12.5 |" in table
    assert "| probe | not begun |" in table


def test_ceilings_that_lie_apart_mark_the_figures_between(run):
    write(run, ceilings(3900.0))
    assert "0.9*" not in Report(run).table()
    write(run, ceilings(3800.0))
    assert "| attention | 0.9* |" in Report(run).table()
    assert "kernels: ceilings before and after are 5.0% apart" in Report(run).table()


def test_case_measured_by_a_later_call_is_not_missing(run):
    late = Missing(part="kernels", case="b", why="about 5 s needed, 1 s left", failed=False)
    write(run, late)
    assert Report(run).missing == [late]
    write(run, End(part="kernels", case="b", seconds=1.0))
    assert Report(run).missing == []


def test_failed_part_is_named_and_fails_the_run(run, capsys):
    write(
        run,
        Missing(part="kernels", case="c", why="ValueError: no"),
        Check(part="tests-rest", case="test_x", outcome="failed", why="E  assert 1 == 2"),
        Check(part="tests-rest", case="test_y", outcome="passed"),
        Check(part="tests-rest", case="test_z", outcome="skipped", why="needs two GPUs"),
    )
    State(parts={"trace": PartState(status=Status.CRASHED, why="status 7")}).write(run)
    assert command.main(["report", str(run), "--json"]) == 1
    *table, reported = capsys.readouterr().out.splitlines()
    assert "failed: kernels: c: ValueError: no" in table
    assert "test failed: tests-rest: test_x: E  assert 1 == 2" in table
    assert json.loads(reported)["failures"] == ["trace: crashed", "kernels: c", "tests-rest: test_x"]


def test_empty_folder_has_an_empty_table(tmp_path):
    assert "| kernels | not begun |" in Report(tmp_path).table()
    assert Report(tmp_path).failures == []
