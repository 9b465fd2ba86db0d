"""Cases and lines of a GPU run: each done once, written at once, and what raises costs itself."""

import msgspec
import pytest
import torch

from tandem_testing.benchmark_modules import benchmarks_importable

with benchmarks_importable():
    from gpu.control import lines
    from gpu.control.record import DeviceLostError, Record

EVERY_KIND = [
    lines.Machine(part="p", facts={"device": "X"}),
    lines.Ceilings(part="p", when="before", copy_gb_s=4300.0, matmul_tflops=790.0, clocks="clocks.sm 1980 MHz"),
    lines.Begin(part="p", case="a"),
    lines.Measured(part="p", case="a", figure=lines.Figure(name="f", ratio=0.9, of="copy", facts={"us": 3.0})),
    lines.Missing(part="p", case="a", why="no room"),
    lines.Check(part="p", case="t", outcome="failed", why="assert", seconds=0.5),
    lines.Compiled(part="p", kernels=["decode_kernel", "decode_kernel"]),
    lines.End(part="p", case="a", seconds=1.5),
]


def record(folder, *, ends_at=float("inf")):
    return Record(part="p", lines=lines.LineFile(folder), ends_at=ends_at)


def of_kind(folder, kind):
    return [line for line in lines.LineFile(folder).read() if isinstance(line, kind)]


def test_every_kind_of_line_is_read_as_written(tmp_path):
    file = lines.LineFile(tmp_path)
    for line in EVERY_KIND:
        file.write(line)
    assert file.read() == EVERY_KIND
    assert {type(line) for line in EVERY_KIND} == set(lines.Line.__args__)


@pytest.mark.parametrize(
    "line", ['{"kind":"begin","part":"p"}', '{"kind":"begin","part":"p","case":"a","more":1}', "{}"]
)
def test_line_of_another_form_is_refused(tmp_path, line):
    (tmp_path / lines.NAME).write_text(line + "\n")
    with pytest.raises(msgspec.ValidationError):
        lines.LineFile(tmp_path).read()


def test_torn_last_line_is_left_out(tmp_path):
    file = lines.LineFile(tmp_path)
    file.write(EVERY_KIND[0])
    with (tmp_path / lines.NAME).open("ab") as torn:
        torn.write(b'{"kind":"begin","par')
    assert file.read() == EVERY_KIND[:1]


def test_line_after_a_torn_one_is_read(tmp_path):
    file = lines.LineFile(tmp_path)
    (tmp_path / lines.NAME).write_bytes(b'{"kind":"begin","par')
    file.write(EVERY_KIND[0])
    assert file.read() == EVERY_KIND[:1]


def test_case_that_is_done_is_not_done_again(tmp_path):
    done = []
    record(tmp_path).case("a", lambda: done.append("a"))
    again = record(tmp_path)
    again.case("a", lambda: done.append("again"))
    again.case("b", lambda: done.append("b"))
    assert done == ["a", "b"]


def test_case_that_was_cut_off_is_done_again(tmp_path):
    lines.LineFile(tmp_path).write(lines.Begin(part="p", case="a"))
    done = []
    record(tmp_path).case("a", lambda: done.append("a"))
    assert done == ["a"]


def test_case_names_of_different_parts_are_independent(tmp_path):
    lines.LineFile(tmp_path).write(lines.End(part="other", case="a", seconds=1.0))
    assert record(tmp_path).wants("a")


def test_case_without_time_is_postponed_and_named(tmp_path):
    late = record(tmp_path, ends_at=0.0)
    late.case("a", lambda: pytest.fail("it was done"), needs_s=5.0)
    assert late.postponed == ["a"]
    (missing,) = of_kind(tmp_path, lines.Missing)
    assert missing.why == "about 5 s needed, 0 s left"
    assert not missing.failed
    assert record(tmp_path).wants("a")


def test_raising_case_fails_alone(tmp_path, capsys):
    def fails():
        raise ValueError("no room\nmore of it")

    one = record(tmp_path)
    one.case("a", fails)
    one.case("b", lambda: one.add(lines.Figure(name="f", ratio=0.9, of="copy")))
    (missing,) = of_kind(tmp_path, lines.Missing)
    assert (missing.case, missing.why, missing.failed) == ("a", "ValueError: no room", True)
    assert [line.case for line in of_kind(tmp_path, lines.Measured)] == ["b"]
    assert [line.case for line in of_kind(tmp_path, lines.End)] == ["a", "b"]
    output = capsys.readouterr().err
    assert "Traceback" in output
    assert "| f | 0.9 | copy |" in output


def test_lost_device_ends_process_after_its_case(tmp_path):
    def loses():
        with one.attempt("a peer"):
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    one = record(tmp_path)
    with pytest.raises(DeviceLostError):
        one.case("a", loses)
    assert not record(tmp_path).wants("a")
    assert [line.case for line in of_kind(tmp_path, lines.Missing)] == ["a"]


def test_peer_without_memory_costs_itself_alone(tmp_path):
    def lacks():
        with one.attempt("a peer"):
            raise torch.OutOfMemoryError("no room")
        one.add(lines.Figure(name="f", ratio=0.9, of="copy"))

    one = record(tmp_path)
    one.case("a", lacks)
    assert [line.case for line in of_kind(tmp_path, lines.Missing)] == ["a peer"]
    assert [line.case for line in of_kind(tmp_path, lines.Measured)] == ["a"]
