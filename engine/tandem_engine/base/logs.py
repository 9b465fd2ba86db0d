"""Log lines: one event per line, as JSON or as text, safe to read in a terminal, and written without blocking.

Values go in `extra={"fields": {...}}`, not into the message, so that a message can be searched for. Control characters
are always escaped: a client's text cannot forge a line or move a cursor.

A separate thread writes, so that logging never waits for the reader:

    record ─▶ formatted where it was logged ─▶ at most `MAX_WAITING` lines ─▶ the thread ─▶ file descriptor
                                               full: dropped and counted       it cannot be written: dropped and counted

The thread writes what has gathered in `GATHER_S`, at once from warnings on: woken for each line, it would compete with
the event loop for the interpreter as often.

A stopped reader (a collector that hangs, a paused terminal) fills the pipe, and a write then blocks forever; on a full
disk it fails. In both cases serving continues, and the first line that can be written again has the number of missing
lines [logs-never-block]. Waiting lines are written when the process ends, or lost after `FLUSH_S`.
"""

import json
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from itertools import islice
from typing import Any, TextIO

MAX_WAITING = 4096
"""Lines; a few megabytes at most."""

FLUSH_S = 1.0

MAX_PER_WRITE = 64
"""Lines. One write fails or succeeds with all of them."""

GATHER_S = 0.01
"""A line below WARNING waits so long for others."""


class LogOutput(logging.Handler):
    """Writes to a file descriptor. Its thread starts with the first record, and again in a forked process."""

    def __init__(self, descriptor: int, *, shared: bool = False) -> None:
        """`shared`: other processes write there too. Longer writes than PIPE_BUF could be mixed with theirs."""
        super().__init__()
        self._descriptor = descriptor
        self._per_write = 1 if shared else MAX_PER_WRITE
        self._dropped = 0
        self._notified = 0
        """Of those dropped."""
        self._owner = 0
        self._reset()

    def emit(self, record: logging.LogRecord) -> None:
        """Never blocks. Called with the handler's lock held."""
        if self._owner != os.getpid():
            self._begin()
        if len(self._lines) >= MAX_WAITING:
            self._dropped += 1
            return
        try:
            self._lines.append(self.format(record))
        except Exception:  # noqa: BLE001 - as the standard library's handlers: it is reported, and the caller does not fail
            self.handleError(record)
            return
        if not self._arrived.is_set():
            self._arrived.set()
        if record.levelno >= logging.WARNING:
            self._at_once.set()

    def flush(self) -> None:
        """Wait until everything is written, at most `FLUSH_S`."""
        if self._owner == os.getpid():
            self._at_once.set()
            with self._written:
                self._written.wait_for(lambda: not self._lines, FLUSH_S)
            self._at_once.clear()

    def _reset(self) -> None:
        self._lines: deque[str] = deque()
        """Not written yet. Only the thread removes them."""
        self._arrived, self._at_once = threading.Event(), threading.Event()
        self._written = threading.Condition()

    def _begin(self) -> None:
        self._owner = os.getpid()
        self._reset()
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def _write(self) -> None:
        while True:
            self._arrived.wait()
            self._at_once.wait(GATHER_S)
            # Before the lines are looked at: one that comes in between sets them again.
            self._arrived.clear()
            self._at_once.clear()
            while self._lines:
                self._write_some()
            with self._written:
                self._written.notify_all()

    def _write_some(self) -> None:
        lines = [*islice(self._lines, self._per_write)]
        dropped = self._dropped
        try:
            missing = [] if dropped == self._notified else [self._missing(dropped - self._notified)]
            text = "".join([f"{line}\n" for line in (*missing, *lines)])
            self._write_whole(text.encode("utf-8", "backslashreplace"))
        except Exception:  # noqa: BLE001  # the boundary of the thread: without it no line is written any more
            # Mostly a full disk, or a closed pipe. The next lines are tried all the same.
            self._dropped += len(lines)
        else:
            self._notified = dropped
        for _ in lines:
            self._lines.popleft()

    def _write_whole(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]

    def _missing(self, count: int) -> str:
        message = "%d log lines are missing here: the output was blocked or failed"
        return self.format(logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, (count,), None))


MAX_QUOTED_CHARACTERS = 200
"""Of a client's value that is repeated in a message."""

_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_ESCAPES |= {0x2028: "\\u2028", 0x2029: "\\u2029"}


class LogFormat(StrEnum):
    JSON = "json"
    PLAIN = "plain"


def escape(text: str) -> str:
    """`text` on one line, control characters and lone surrogates made visible."""
    return text.translate(_ESCAPES).encode("utf-8", "backslashreplace").decode("utf-8")


def quoted(value: object) -> str:
    """A client's value, escaped and short enough to repeat in an error message."""
    text = escape(str(value)[: MAX_QUOTED_CHARACTERS + 1])
    return text if len(text) <= MAX_QUOTED_CHARACTERS else text[:MAX_QUOTED_CHARACTERS] + "…"


def about_request(request_id: str, *, rid: str | None = None, trace_id: str | None = None) -> dict[str, Any]:
    """Fields that every record about a client's request has, in whichever process.

    `rid` is the attempt at it that an engine knows; `trace_id` that of its OpenTelemetry trace, if it has one.
    """
    known = {"request_id": request_id, "rid": rid, "trace_id": trace_id}
    return {name: value for name, value in known.items() if value is not None}


_ENCODER = json.JSONEncoder(default=str)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _ENCODER.encode(line)


class PlainFormatter(logging.Formatter):
    """`time level logger message key=value …`, for people."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S.%f")[:-3]
        fields = "".join(f" {key}={value}" for key, value in _fields(record).items())
        line = escape(f"{time} {record.levelname:<7} {record.name} {record.getMessage()}{fields}")
        if record.exc_info:
            line += "\n" + "\n".join(map(escape, self.formatException(record.exc_info).splitlines()))
        return line


def configure_logging(
    log_format: LogFormat, *, level: int = logging.INFO, stream: TextIO | None = None, shared: bool = False
) -> None:
    """Send all records to stderr without blocking the caller, or to `stream`. Call once, at process start.

    `shared`: other processes log to the same stderr.
    """
    handler = _to_stderr(shared=shared) if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if log_format is LogFormat.JSON else PlainFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def _to_stderr(*, shared: bool) -> logging.Handler:
    try:
        return LogOutput(sys.stderr.fileno(), shared=shared)
    except (OSError, ValueError):
        # Something else stands in for it, in a notebook or a test.
        return logging.StreamHandler(sys.stderr)


def configured_format() -> LogFormat:
    """The format that this process logs in, for those that it starts."""
    formatters = (handler.formatter for handler in logging.getLogger().handlers)
    return LogFormat.JSON if any(isinstance(each, JsonFormatter) for each in formatters) else LogFormat.PLAIN


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields = record.__dict__.get("fields")
    return fields if isinstance(fields, Mapping) else {}
