"""Where log lines go: from a thread of its own, so that nobody who logs ever waits for whoever reads.

    record ─▶ formatted where it was logged ─▶ at most `MAX_WAITING` lines ─▶ the thread ─▶ file descriptor
                                               full: dropped and counted       it cannot be written: dropped and counted

A reader that stops (a collector that hangs, a terminal that is held) fills the pipe, and a write then blocks for ever;
on a full disk it fails. Either way serving goes on, and when lines can be written again the first one says how many are
missing [logs-never-block]. What waits is written when the process ends, or lost after `FLUSH_S`.
"""

import logging
import os
import queue
import threading

MAX_WAITING = 4096
"""Lines; a few megabytes at most."""
FLUSH_S = 1.0


class LogOutput(logging.Handler):
    """Writes to a file descriptor. Its thread begins with the first record, in forked processes anew."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._dropped = 0
        self._owner = 0
        self._lines: queue.Queue[str] = queue.Queue(MAX_WAITING)

    def emit(self, record: logging.LogRecord) -> None:
        """Never blocks. Called with the handler's lock held."""
        if self._owner != os.getpid():
            self._begin()
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1
        except Exception:  # noqa: BLE001 - as the standard library's handlers: it is told, and is no failure of who logs
            self.handleError(record)

    def flush(self) -> None:
        """Wait until everything is written, at most `FLUSH_S`."""
        if self._owner == os.getpid():
            with self._lines.all_tasks_done:
                self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, FLUSH_S)

    def _begin(self) -> None:
        self._owner, self._lines = os.getpid(), queue.Queue(MAX_WAITING)
        threading.Thread(target=self._write, args=(self._lines,), name="log", daemon=True).start()

    def _write(self, lines: "queue.Queue[str]") -> None:
        told = 0
        while True:
            line = lines.get()
            dropped = self._dropped
            text = f"{line}\n" if dropped == told else f"{self._missing(dropped - told)}\n{line}\n"
            try:
                self._write_whole(text.encode("utf-8", "backslashreplace"))
            except OSError:
                # A full disk, or nobody at the other end. The next line is tried all the same.
                self._dropped += 1
            else:
                told = dropped
            lines.task_done()

    def _write_whole(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]

    def _missing(self, count: int) -> str:
        message = "%d log lines are missing here: the output was blocked or failed"
        return self.format(logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, (count,), None))
