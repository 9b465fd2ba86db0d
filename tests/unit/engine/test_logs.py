"""Log lines: one event, one line, nothing that a terminal obeys."""

import io
import json
import logging
import os

import pytest

from tandem_engine.base.logs import (
    JsonFormatter,
    LogFormat,
    LogOutput,
    PlainFormatter,
    about_request,
    configure_logging,
    configured_format,
    escape,
    quoted,
)

HOSTILE = "a\r\nb\x1b[2J\x00\x9b\u2028c\ud800"


def line(message: str = "event", **fields: object) -> logging.LogRecord:
    record = logging.LogRecord("tandem", logging.INFO, "file.py", 1, message, None, None)
    record.__dict__["fields"] = fields
    return record


@pytest.mark.parametrize("formatter", [JsonFormatter(), PlainFormatter()])
def test_hostile_text_stays_on_one_printable_line(formatter):  # [hostile-log-text]
    for record in (line(HOSTILE), line(value=HOSTILE)):
        text = formatter.format(record)
        assert text.isprintable()
        assert len(text.splitlines()) == 1


def test_json_lines_carry_their_fields():
    parsed = json.loads(JsonFormatter().format(line("done", tokens=3, worker="d@1")))
    assert (parsed["message"], parsed["tokens"], parsed["worker"]) == ("done", 3, "d@1")
    assert parsed["level"] == "INFO"


@pytest.mark.parametrize("log_format", list(LogFormat))
def test_exceptions_are_logged_with_their_trace(log_format, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    stream = io.StringIO()
    configure_logging(log_format, stream=stream)
    try:
        raise ValueError("boom\x1b")
    except ValueError:
        logging.getLogger("x").exception("it failed")
    assert "ValueError: boom" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_quoted_values_are_short_and_printable():
    assert quoted("x" * 500) == "x" * 200 + "…"
    assert quoted(HOSTILE).isprintable()
    assert escape("plain é 你") == "plain é 你"


@pytest.mark.parametrize("log_format", list(LogFormat))
def test_processes_that_are_started_from_here_log_as_this_one(log_format, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    assert configured_format() is LogFormat.PLAIN
    configure_logging(log_format, stream=io.StringIO())
    assert configured_format() is log_format


def test_record_about_a_request_has_its_known_fields():
    assert about_request("r") == {"request_id": "r"}
    assert about_request("r", rid="r-0-1", trace_id="t") == {"request_id": "r", "rid": "r-0-1", "trace_id": "t"}


def test_error_of_the_log_thread_costs_one_write(monkeypatch):
    reading, writing = os.pipe()
    output = LogOutput(writing)
    output.setFormatter(PlainFormatter())
    real, raised = LogOutput._write_whole, []

    def failing(self, data):
        if not raised:
            raised.append(data)
            raise ValueError("of the test")
        real(self, data)

    monkeypatch.setattr(LogOutput, "_write_whole", failing)
    output.handle(line("first"))
    output.flush()
    output.handle(line("second"))
    output.flush()
    os.close(writing)
    with os.fdopen(reading) as written:
        text = written.read()
    assert raised
    assert "1 log lines are missing here" in text
    assert "second" in text
    assert "first" not in text


def test_error_of_the_line_about_missing_ones_costs_one_write(monkeypatch):
    reading, writing = os.pipe()
    output = LogOutput(writing)
    output.setFormatter(PlainFormatter())
    real, failures = LogOutput._missing, [ValueError("of the test")]

    def failing(self, count):
        if failures:
            raise failures.pop()
        return real(self, count)

    monkeypatch.setattr(LogOutput, "_missing", failing)
    output._dropped = 5
    for number in range(2):
        output.handle(line(f"line {number}"))
        output.flush()
    os.close(writing)
    with os.fdopen(reading) as written:
        text = written.read()
    assert not failures
    assert "6 log lines are missing here" in text
    assert "line 1" in text
