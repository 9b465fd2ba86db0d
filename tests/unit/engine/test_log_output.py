"""Logs that cannot be written keep no process from serving [logs-never-block]: blocked pipe, full disk, no reader."""

import fcntl
import io
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tandem_engine.base.logs import MAX_PER_WRITE, MAX_WAITING, JsonFormatter, LogFormat, LogOutput, configure_logging

ROOT = Path(__file__).parents[3]
PATIENCE_S = 60.0
LOTS = MAX_WAITING + 2000


@pytest.fixture
def make():
    """A logger that writes to a descriptor."""
    made = []

    def logger_to(descriptor: int) -> tuple[logging.Logger, LogOutput]:
        output = LogOutput(descriptor)
        output.setFormatter(JsonFormatter())
        logger = logging.Logger("test")
        logger.addHandler(output)
        made.append((descriptor, output))
        return logger, output

    yield logger_to
    for descriptor, output in made:
        output.flush()
        os.close(descriptor)


def test_lines_arrive_in_order_and_a_flush_waits_for_them(make, tmp_path):
    path = tmp_path / "log"
    logger, output = make(os.open(path, os.O_WRONLY | os.O_CREAT))
    for number in range(100):
        logger.info("line %d", number)
    output.flush()
    assert [json.loads(line)["message"] for line in path.read_text().splitlines()] == [f"line {n}" for n in range(100)]


def test_lines_that_come_together_are_one_write(make, tmp_path, monkeypatch):
    writes = []
    write = os.write
    monkeypatch.setattr("os.write", lambda descriptor, data: writes.append(data) or write(descriptor, data))
    logger, output = make(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT))
    for number in range(MAX_PER_WRITE):
        logger.info("line %d", number)
    output.flush()
    assert b"".join(writes).count(b"\n") == MAX_PER_WRITE
    assert len(writes) < MAX_PER_WRITE / 4


def test_warnings_are_written_without_waiting_for_others(make, monkeypatch):
    monkeypatch.setattr("tandem_engine.base.logs.GATHER_S", 1e6)
    reader, writer = os.pipe()
    logger, _ = make(writer)
    logger.info("waits")
    logger.warning("urgent")
    with os.fdopen(reader) as pipe:
        assert [json.loads(pipe.readline())["message"] for _ in range(2)] == ["waits", "urgent"]


def test_line_just_before_the_end_of_a_process_is_written():
    program = (
        "import logging\n"
        "from tandem_engine.base.logs import LogFormat, configure_logging\n"
        "configure_logging(LogFormat.JSON)\n"
        "logging.info('the last word')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "engine")}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment, capture_output=True, timeout=PATIENCE_S, check=True)
    assert json.loads(ended.stderr)["message"] == "the last word"


def test_unread_log_pipe_drops_lines_and_counts_them(make):
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    logger, _ = make(writer)
    for _ in range(LOTS):
        logger.info("x" * 100)
    with os.fdopen(reader) as pipe:
        seen = [json.loads(pipe.readline())["message"] for _ in range(MAX_WAITING // 2)]
        logger.info("the last")
        while seen[-1] != "the last":
            seen.append(json.loads(pipe.readline())["message"])
    reported = [int(match[1]) for message in seen if (match := re.match(r"(\d+) log lines are missing here", message))]
    assert seen.count("x" * 100) + sum(reported) == LOTS
    assert sum(reported) > 0


def test_full_disk_or_closed_pipe_does_not_end_logging(make):
    logger, output = make(os.open("/dev/full", os.O_WRONLY))
    logger.info("lost")
    output.flush()
    reader, writer = os.pipe()
    os.close(reader)
    logger, output = make(writer)
    logger.info("lost, too")
    output.flush()


def test_process_with_unread_log_pipe_serves_and_exits():
    """With the whole set-up of a worker or a gateway, its end included."""
    program = (
        "import logging\n"
        "from tandem_engine.base.logs import LogFormat, configure_logging\n"
        "configure_logging(LogFormat.JSON)\n"
        f"for number in range({LOTS}): logging.info('x' * 200)\n"
        "print('served', flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "engine")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, text=True, **pipes) as process:
        assert process.stdout.readline() == "served\n"
        assert process.wait(PATIENCE_S) == 0


def test_logs_go_to_stderr_that_is_no_file(monkeypatch):
    stream = io.StringIO()
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr("sys.stderr", stream)
    configure_logging(LogFormat.PLAIN)
    logging.getLogger("x").warning("seen")
    assert "seen" in stream.getvalue()
