"""Passes on what child processes write, without ever making them wait.

    child ─▶ pipe ─▶ reader thread ─▶ queue of a writer thread ─▶ file NAME.log
                                    └▶ queue of a writer thread ─▶ standard output

The reader takes lines from all pipes, adds the time to those without one, and puts them into bounded queues. A full
queue, which is a disk or a terminal that does not keep up, and a failed write, such as on a full disk, drop lines;
the next write that succeeds has their number. No error ends a thread: children block on a pipe that is not read.
"""

import os
import re
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path

MAX_FILE_BYTES = 64 << 20
"""Of a log; then it is renamed as at a start."""

MAX_LINE_BYTES = 1 << 16
"""A longer line is cut into several."""

MAX_QUEUE_BYTES = 4 << 20
KEPT_BYTES = 1 << 18
"""Of what a process wrote last, for the sentence about its end."""

ERROR_PAUSE_S = 0.1
"""After an error that may happen at each turn."""

_CHUNK = 1 << 16
_POLL_S = 0.005
_HAS_TIME = re.compile(rb".{0,24}\b\d\d:\d\d:\d\d\b|\{")
"""Our own lines, plain and JSON, and those of Redis."""


class LogTo(StrEnum):
    """Where the output of child processes goes."""

    FILES = "files"
    STDOUT = "stdout"
    BOTH = "both"


@dataclass(slots=True)
class Destination:
    """Of the lines of one process. `write` raises `OSError`; what it could not write is counted and reported."""

    write: Callable[[bytes], None]
    _dropped: int = 0
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def take(self, lines: bytes) -> None:
        """Write `lines`, after the number of those that were dropped before."""
        dropped, notice = self._dropped, b""
        if dropped:
            notice = _stamped(f"{dropped} lines were dropped: they could not be written in time\n".encode())
            notice = b"\n" + notice  # the last line may have been written in part
        try:
            self.write(notice + lines)
        except OSError:
            self.drop(lines)
        else:
            with self._counting:
                self._dropped -= dropped

    def drop(self, lines: bytes) -> None:
        """Count `lines` and forget them. Called by two threads."""
        with self._counting:
            self._dropped += lines.count(b"\n")


@dataclass(slots=True)
class _Writer:
    """A thread that writes what the reader hands to it."""

    name: str
    _queue: "deque[tuple[Destination, bytes]]" = field(default_factory=deque)
    _bytes: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _busy: bool = False
    _closed: bool = False
    _thread: threading.Thread | None = None

    def put(self, destination: Destination, lines: bytes) -> None:
        """Queue `lines`, or drop them."""
        with self._changed:
            if self._bytes + len(lines) > MAX_QUEUE_BYTES:
                destination.drop(lines)
                return
            self._queue.append((destination, lines))
            self._bytes += len(lines)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                thread.start()  # at a limit of threads it raises, and the next lines try again
                self._thread = thread
            self._changed.notify()

    @property
    def idle(self) -> bool:
        """Everything has been written or dropped."""
        with self._changed:
            return not self._queue and not self._busy

    def close(self) -> None:
        """End the thread once its queue is empty; it does not wait."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                while not self._queue and not self._closed:
                    self._changed.wait()
                if not self._queue:
                    return
                destination, lines = self._queue.popleft()
                self._bytes -= len(lines)
                self._busy = True
            try:
                destination.take(lines)
            except Exception as error:  # noqa: BLE001  # boundary of the thread, which all later lines need
                destination.drop(lines)
                _report(error)


@dataclass(slots=True)
class Output:
    """What one process wrote since its start."""

    name: str
    destinations: Sequence[tuple[_Writer, Destination]]
    received: int = 0
    tail: bytes = b""
    _rest: bytes = b""
    """Of a line without its end."""

    def take(self, data: bytes) -> None:
        """`data`: b"" at the end."""
        self.received += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) >= MAX_LINE_BYTES):
            lines.append(self._rest)
            self._rest = b""
        text = b"".join(_stamped(line + b"\n") for line in lines)
        if text:
            self.tail = (self.tail + text)[-KEPT_BYTES:]
            for writer, destination in self.destinations:
                writer.put(destination, text)


@dataclass(slots=True)
class LogPump:
    """Of one supervisor. `rotate` makes the name of a full log free."""

    to: LogTo = LogTo.FILES
    rotate: Callable[[Path], None] | None = None
    stdout: int = 1
    _files: _Writer = field(default_factory=lambda: _Writer("logs to files"))
    _terminal: _Writer = field(default_factory=lambda: _Writer("logs to standard output"))
    _outputs: dict[int, Output] = field(default_factory=dict)
    _ready: "select.epoll | None" = None
    _reading: threading.Lock = field(default_factory=threading.Lock)
    _closing: bool = False

    @property
    def writes_files(self) -> bool:
        return self.to is not LogTo.STDOUT

    def open(self, name: str, log: Path) -> tuple[int, Output]:
        """A descriptor for the output of a process, to be closed once it has it, and what it wrote.

        Raises `OSError`, `RuntimeError` at a limit of descriptors or threads.
        """
        destinations = []
        if self.writes_files:
            destinations.append((self._files, Destination(lambda lines: self._write_file(log, lines))))
        if self.to is not LogTo.FILES:
            prefix = f"{name}: ".encode()
            destinations.append((self._terminal, Destination(lambda lines: self._write_stdout(prefix, lines))))
        output = Output(name, destinations)
        if self._ready is None:
            ready = select.epoll()
            threading.Thread(target=self._run, args=(ready,), name="logs of children", daemon=True).start()
            self._ready = ready
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._outputs[reading] = output
        self._ready.register(reading, select.EPOLLIN)
        return writing, output

    def settle(self, limit_s: float = 5.0) -> None:
        """Wait until what children have written is written on, but no longer than `limit_s`."""
        deadline = time.monotonic() + limit_s
        while not self.settled and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Settle, and end the threads. The children are gone."""
        self.settle()
        self._closing = True
        self._files.close()
        self._terminal.close()

    @property
    def settled(self) -> bool:
        """What children have written is written on, or dropped."""
        if self._ready is None:
            return True
        with self._reading:
            return not self._ready.poll(0) and self._files.idle and self._terminal.idle

    def _run(self, ready: "select.epoll") -> None:
        while not (self._closing and not self._outputs):
            try:
                ready.poll(1.0)
                with self._reading:
                    for descriptor, _ in ready.poll(0):
                        self._read(ready, descriptor)
            except Exception as error:  # noqa: BLE001  # boundary of the thread, which all later lines need
                _report(error)
                time.sleep(ERROR_PAUSE_S)

    def _read(self, ready: "select.epoll", descriptor: int) -> None:
        data = os.read(descriptor, _CHUNK)
        output = self._outputs[descriptor]
        output.take(data)
        if not data:
            ready.unregister(descriptor)
            del self._outputs[descriptor]
            os.close(descriptor)  # from now on its number may be another pipe's

    def _write_file(self, log: Path, lines: bytes) -> None:
        if self.rotate is not None and log.exists() and log.stat().st_size + len(lines) > MAX_FILE_BYTES:
            self.rotate(log)
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            _write_all(descriptor, lines)
        finally:
            os.close(descriptor)

    def _write_stdout(self, prefix: bytes, lines: bytes) -> None:
        # JSON stays JSON.
        named = b"".join(line if line.startswith(b"{") else prefix + line for line in lines.splitlines(keepends=True))
        _write_all(self.stdout, named)


def _report(error: Exception) -> None:
    with suppress(OSError, ValueError):  # standard error is closed
        print(f"tandem: lines of logs are lost: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _stamped(line: bytes) -> bytes:
    if _HAS_TIME.match(line):
        return line
    now = datetime.now().astimezone()
    return f"{now:%H:%M:%S}.{now.microsecond // 1000:03d} ".encode() + line
