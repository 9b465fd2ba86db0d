"""What an engine writes about its start, and what is read of it."""

import json
from pathlib import Path

import pytest

from tandem_engine.base.progress import Phase, Progress, Reporter, read_progress
from tandem_engine.model.loader import load_progress


class Clock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s


def reporter(path: Path, clock: Clock) -> Reporter:
    made = Reporter()
    made.report_to(path, clock)
    return made


def test_each_phase_is_readable_at_once(tmp_path):
    path, clock = tmp_path / "progress", Clock()
    start = reporter(path, clock)
    for phase in Phase:
        start.report(phase)
        assert read_progress(path) == Progress(phase=phase)
    assert [each.name for each in tmp_path.iterdir()] == ["progress"]


def test_one_phase_is_written_ten_times_a_second_and_at_its_end(tmp_path):
    path, clock = tmp_path / "progress", Clock()
    start = reporter(path, clock)
    for done in range(5):
        start.report(Phase.WEIGHTS, done=done, total=9, unit="bytes")
    assert read_progress(path) == Progress(phase="weights", done=0, total=9, unit="bytes")
    clock.time_s = 1.0
    start.report(Phase.WEIGHTS, done=5, total=9, unit="bytes")
    assert read_progress(path) == Progress(phase="weights", done=5, total=9, unit="bytes")
    start.report(Phase.WEIGHTS, done=9, total=9, unit="bytes")
    assert read_progress(path) == Progress(phase="weights", done=9, total=9, unit="bytes")


def test_kernels_are_counted_out_of_those_found_missing(tmp_path):
    path = tmp_path / "progress"
    start = reporter(path, Clock())
    start.kernel_missing()
    start.kernel_missing()
    assert str(read_progress(path)) == "kernels 0 of 2"
    start.kernel_compiled()
    assert str(read_progress(path)) == "kernels 1 of 2"


def test_nothing_is_written_after_the_start(tmp_path):
    path = tmp_path / "progress"
    start = reporter(path, Clock())
    start.report(Phase.REGISTRATION)
    start.report_to(None)
    start.report(Phase.KERNELS)
    assert read_progress(path) == Progress(phase="registration")


def test_file_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    start = reporter(tmp_path / "missing" / "progress", Clock())
    for phase in Phase:
        start.report(phase)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"phase": 1, "done": "x", "total": 0, "unit": ""}', "3"])
def test_unreadable_progress_is_none(tmp_path, text):
    (tmp_path / "progress").write_text(text)
    assert read_progress(tmp_path / "progress") is None


def test_progress_of_bytes_is_a_share_of_gibibytes():
    assert str(Progress(phase="weights", done=3 << 29, total=2 << 30, unit="bytes")) == "weights 75 % of 2.00 GiB"
    assert Progress(phase="weights").share is None


def test_reading_weights_is_reported_as_bytes(tmp_path, monkeypatch):
    path = tmp_path / "progress"
    monkeypatch.setattr("tandem_engine.model.loader.START", reporter(path, Clock()))
    with load_progress(10, shown=False) as advance:
        advance(4)
        advance(6)
    assert json.loads(path.read_text()) == {"phase": "weights", "done": 10, "total": 10, "unit": "bytes"}


def test_function_gets_due_reports_until_its_block_ends():
    start, clock, seen = Reporter(), Clock(), []
    with start.also_to(seen.append, clock):
        for done in (0, 1, 2):
            start.report(Phase.WEIGHTS, done=done, total=9, unit="bytes")
        start.report(Phase.MEMORY)
    start.report(Phase.SELF_TEST)
    assert list(map(str, seen)) == ["weights 0 % of 0.00 GiB", "memory"]


def test_error_of_the_function_ends_the_start():
    def fail(_: Progress) -> None:
        raise KeyboardInterrupt

    start = Reporter()
    with pytest.raises(KeyboardInterrupt), start.also_to(fail):
        start.report(Phase.WEIGHTS)
    start.report(Phase.MEMORY)
