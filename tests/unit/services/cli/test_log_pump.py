"""Output of child processes: to files and standard output, in lines with their time, and never a wait."""

import errno
import os
import re
import sys
import threading

import pytest

from tandem_services.cli.logs import pump as module
from tandem_services.cli.logs.pump import LogPump, LogTo
from tandem_services.cli.main import build_parser
from tandem_services.cli.processes import Child, Supervisor
from tandem_services.cli.run_dir import prepare_run_dir, rotate_log
from tandem_testing.waiting import wait_for

WAIT_S = 60.0
STAMP = re.compile(r"^\d\d:\d\d:\d\d\.\d{3} ", re.MULTILINE)


def bare(text: str) -> str:
    """Without the times that were added."""
    return STAMP.sub("", text)


class Piped:
    """A process in the test: what it writes."""

    def __init__(self, pump: LogPump, folder, name: str = "c") -> None:
        self.pump, self.log = pump, folder / f"{name}.log"
        self.descriptor, self.output = pump.open(name, self.log)

    def write(self, data: bytes) -> None:
        os.write(self.descriptor, data)
        wait_for(lambda: self.pump.settled, WAIT_S)

    def close(self) -> None:
        os.close(self.descriptor)
        wait_for(lambda: self.pump.settled, WAIT_S)


def test_lines_get_a_time_where_they_have_none(tmp_path):
    child = Piped(LogPump(), tmp_path)
    child.write(b'10:00:00.123 INFO x\n{"a": 1}\n1:C 27 Nov 2026 10:00:00.1 * x\nno time\nhalf a ')
    child.write(b"line\nrest")
    child.close()
    lines = child.log.read_text().splitlines()
    assert lines[:3] == ["10:00:00.123 INFO x", '{"a": 1}', "1:C 27 Nov 2026 10:00:00.1 * x"]
    assert [bare(line) for line in lines[3:]] == ["no time", "half a line", "rest"]
    assert all(STAMP.match(line) for line in lines[3:])
    assert child.log.stat().st_mode & 0o777 == 0o600
    assert child.output.received == len(
        '10:00:00.123 INFO x\n{"a": 1}\n1:C 27 Nov 2026 10:00:00.1 * x\nno time\nhalf a line\nrest'
    )


@pytest.mark.parametrize(
    ("to", "file", "shown"), [("files", "a\n", ""), ("stdout", None, "c: a\n"), ("both", "a\n", "c: a\n")]
)
def test_output_goes_to_destination_of_log_to(to, file, shown, tmp_path):
    reading, writing = os.pipe()
    child = Piped(LogPump(to=LogTo(to), stdout=writing), tmp_path)
    child.write(b"a\n")
    child.write(b"")
    child.close()
    os.close(writing)
    with os.fdopen(reading) as read:
        text = read.read()
    assert re.sub(r"\d\d:\S+ ", "", text) == shown
    assert (bare(child.log.read_text()) if child.log.exists() else None) == file


def test_json_lines_on_standard_output_stay_json(tmp_path):
    reading, writing = os.pipe()
    child = Piped(LogPump(to=LogTo.STDOUT, stdout=writing), tmp_path)
    child.write(b'{"a": 1}\n')
    child.close()
    assert os.read(reading, 100) == b'{"a": 1}\n'


def test_long_line_is_cut_and_odd_bytes_stay(tmp_path):
    child = Piped(LogPump(), tmp_path)
    for _ in range(2):
        child.write(b"x" * (module.MAX_LINE_BYTES // 2))
    child.write(b"\xff\x00\n")
    child.close()
    assert STAMP.sub("", child.log.read_bytes().decode("latin-1")) == "x" * module.MAX_LINE_BYTES + "\n\xff\x00\n"


def test_full_disk_drops_lines_and_counts_them(tmp_path, monkeypatch):
    child = Piped(LogPump(), tmp_path)
    child.write(b"before\n")

    def full(descriptor: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(module, "_write_all", full)
        child.write(b"one\ntwo\n")
        child.write(b"three\n")
    child.write(b"after\n")
    child.close()
    lines = bare(child.log.read_text()).splitlines()
    assert [line for line in lines if line] == [
        "before",
        "3 lines were dropped: they could not be written in time",
        "after",
    ]


def test_disk_that_hangs_does_not_make_the_child_wait(tmp_path, monkeypatch):
    go = threading.Event()
    write_all = module._write_all

    def slow(descriptor: int, data: bytes) -> None:
        go.wait()
        write_all(descriptor, data)

    monkeypatch.setattr(module, "_write_all", slow)
    pump = LogPump()
    descriptor, output = pump.open("c", tmp_path / "c.log")
    line = b"x" * 999 + b"\n"
    lines = 4 * module.MAX_QUEUE_BYTES // len(line)
    for _ in range(lines):
        os.write(descriptor, line)  # would block forever once pipe and queue are full
    os.close(descriptor)
    wait_for(lambda: output.received == lines * len(line), WAIT_S)
    go.set()
    wait_for(lambda: pump.settled, WAIT_S)
    text = (tmp_path / "c.log").read_text()
    assert module.MAX_QUEUE_BYTES // 2 < len(text) < lines * len(line)


def test_full_log_is_rotated_and_foreign_files_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 100)
    (tmp_path / "c.log.3").write_text("foreign")
    prepare_run_dir(tmp_path, files=(), logs=["c.log"])
    child = Piped(LogPump(rotate=rotate_log), tmp_path)
    for number in range(6):
        child.write(b"%d" % number * 60 + b"\n")
    child.close()
    found = {path.name: bare(path.read_text())[:1] for path in tmp_path.glob("c.log*")}
    assert found == {"c.log": "5", "c.log.1": "4", "c.log.2": "3", "c.log.3": "f"}
    # The names are known at the next start.
    prepare_run_dir(tmp_path, files=(), logs=["c.log"])
    assert {path.name: bare(path.read_text())[:1] for path in tmp_path.glob("c.log*")} == {
        "c.log.1": "5",
        "c.log.2": "4",
        "c.log.3": "f",
    }


def test_output_of_exited_child_is_complete(tmp_path):
    code = "import sys; print('x' * 100_000); sys.stderr.write('tandem: error: out of luck\\n'); sys.exit(3)"
    reading, writing = os.pipe()
    supervisor = Supervisor(pump=LogPump(to=LogTo.STDOUT, stdout=writing))
    child = Child(name="c", argv=[sys.executable, "-c", code], log=tmp_path / "c.log")
    threading.Thread(target=lambda: [None for _ in iter(lambda: os.read(reading, 1 << 16), b"")], daemon=True).start()
    supervisor.start(child)
    child.process.wait(timeout=60)
    assert child.last_log_lines() == ": out of luck (log: standard output)"
    supervisor.stop(0.0)
    os.close(writing)


def test_writing_end_of_a_log_is_in_no_other_child(tmp_path):
    """Otherwise the pipe of a process that has ended stays open, and its end is never read."""
    supervisor = Supervisor()
    code = "import os; print(sorted(os.listdir('/proc/self/fd')))"
    for name in ("a", "b"):
        supervisor.start(Child(name=name, argv=[sys.executable, "-c", code], log=tmp_path / f"{name}.log"))
    for child in supervisor.children:
        child.process.wait(timeout=60)
    supervisor.stop(0.0)
    texts = {bare((tmp_path / f"{name}.log").read_text()) for name in ("a", "b")}
    assert texts == {"['0', '1', '2', '3']\n"}  # 3 is the folder that is listed


def test_log_to_is_a_setting_of_up(monkeypatch):
    monkeypatch.setenv("TANDEM_LOG_TO", "both")
    assert build_parser().parse_args(["up"]).log_to == "both"
    assert build_parser().parse_args(["up", "--log-to", "stdout"]).log_to == "stdout"


@pytest.mark.parametrize("place", [(module.Output, "take"), (module.Destination, "take"), (LogPump, "_read")])
def test_error_of_the_pump_is_reported_and_later_lines_arrive(place, tmp_path, monkeypatch, capsys):
    owner, name = place
    child, real, raised = Piped(LogPump(), tmp_path), getattr(owner, name), []

    def failing(*args, **kwargs):
        if not raised:
            raised.append(1)
            raise ValueError("of the test")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
    child.write(b"lost or late\n")
    wait_for(lambda: bool(raised), WAIT_S)
    child.write(b"later\n")
    child.close()
    assert bare(child.log.read_text()).endswith("later\n")
    assert "lines of logs are lost: ValueError: of the test" in capsys.readouterr().err


def test_lines_of_a_write_that_fails_unexpectedly_are_counted(tmp_path, monkeypatch):
    child, real, raised = Piped(LogPump(), tmp_path), LogPump._write_file, []

    def failing(*args):
        if not raised:
            raised.append(1)
            raise ValueError("of the test")
        return real(*args)

    monkeypatch.setattr(LogPump, "_write_file", failing)
    child.write(b"a\nb\n")
    child.write(b"later\n")
    child.close()
    assert [bare(line) for line in child.log.read_text().splitlines()][-2:] == [
        "2 lines were dropped: they could not be written in time",
        "later",
    ]


@pytest.mark.parametrize("thread", ["logs of children", "logs to files"])
def test_log_thread_that_cannot_start_is_started_later(thread, tmp_path, monkeypatch):
    """At a limit of threads and processes."""
    real, raised = threading.Thread.start, []

    def failing(self):
        if self.name == thread and not raised:
            raised.append(1)
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", failing)
    pump, before = LogPump(), len(os.listdir("/proc/self/fd"))
    if thread == "logs of children":
        with pytest.raises(RuntimeError, match="new thread"):
            pump.open("c", tmp_path / "c.log")
        assert len(os.listdir("/proc/self/fd")) == before
    child = Piped(pump, tmp_path)
    os.write(child.descriptor, b"first\n")
    wait_for(lambda: bool(raised), WAIT_S)
    os.write(child.descriptor, b"later\n")
    wait_for(lambda: child.log.exists() and bare(child.log.read_text()).endswith("later\n"), WAIT_S)
    child.close()
