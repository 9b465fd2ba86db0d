"""Loads that run one after the other on a thread, beside the steps of an engine.

A file system that does not answer keeps a thread in a read that nothing can end. Such a load fails, and the next one
runs on another thread. A load hangs when its thread has used no CPU time for `hung_s`: one from a slow disk continues.
"""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Thread, current_thread
from typing import Generic, TypeVar

from tandem_engine.base.errors import BusyError, EngineStoppedError

T = TypeVar("T")

HUNG_S = 30.0
LOOKS = 10
"""In `hung_s`. A process that was stopped for a while misses one, and its loads are not taken for hung."""
MAX_HUNG = 4
"""Threads in reads that do not end. With as many no further load begins."""


@dataclass(kw_only=True, slots=True)
class _Load(Generic[T]):
    what: str
    """What the load is of, for errors."""
    work: Callable[[], T]
    future: "Future[T]"
    given_up: bool = False
    """Its thread hangs, and is the one that runs loads no more."""


@dataclass(kw_only=True, slots=True)
class LoadThreads(Generic[T]):
    """Runs loads in the order of `begin`, one at a time but for those that hang.

    Threads are daemons: a process exits although one hangs.
    """

    name: str
    """Of the threads."""
    hung_s: float = HUNG_S
    _queued: "deque[_Load[T]]" = field(default_factory=deque)
    _running: "_Load[T] | None" = None
    _reader: Thread | None = None
    """Runs loads. None before the first one, and while `MAX_HUNG` hang."""
    _watch: Thread | None = None
    _hung: int = 0
    _closed: bool = False
    _changed: Condition = field(default_factory=Condition)
    """Of all fields above."""
    _ended: int = field(default_factory=lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def begin(self, what: str, work: Callable[[], T]) -> "Future[T]":
        """Call `work` on a thread; the future has its result or exception.

        The future raises `BusyError` for a load that hangs. Raises `BusyError` while `MAX_HUNG` loads hang, and
        `EngineStoppedError` after `close`.
        """
        with self._changed:
            if self._closed:
                raise EngineStoppedError("this engine is closed")
            if self._hung >= MAX_HUNG:
                raise BusyError(f"{what} cannot be loaded: {self._hung} loads wait for a file system that hangs")
            self._start()
            load = _Load(what=what, work=work, future=Future())
            self._queued.append(load)
            self._changed.notify_all()
        return load.future

    def fileno(self) -> int:
        """Readable when a load has ended since `acknowledge`."""
        return self._ended

    def acknowledge(self) -> None:
        """Ended loads have been looked at."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._ended)

    def close(self, timeout_s: float) -> None:
        """Cancel what has not begun, and wait for the load in progress for `timeout_s`. Idempotent."""
        with self._changed:
            self._closed = True
            reader = self._reader
            while self._queued:
                self._queued.popleft().future.cancel()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._running is None, timeout_s)
            if self._running is not None or self._hung:
                return  # their threads write to the descriptor when the file system answers
        if reader is not None:
            reader.join()
        if self._ended >= 0:
            os.close(self._ended)
            self._ended = -1

    def _start(self) -> None:
        try:
            if self._reader is None:
                self._reader = _started(self._read, self.name)
            if self._watch is None:
                self._watch = _started(self._look, f"{self.name}-watch")
        except RuntimeError as error:
            raise BusyError(f"no thread for loads: {error}") from error

    def _read(self) -> None:
        while (load := self._next()) is not None:
            result: T | BaseException
            try:
                result = load.work()
            except BaseException as error:  # noqa: BLE001  # raised where the future is read
                result = error
            self._end(load, result)
            # This frame would keep the result in memory until the next load.
            del load, result

    def _next(self) -> "_Load[T] | None":
        """Wait for the next load. None where this thread has to end."""
        with self._changed:
            while self._reader is current_thread() and not self._closed:
                if self._queued:
                    load = self._queued.popleft()
                    if load.future.set_running_or_notify_cancel():
                        self._running = load
                        self._changed.notify_all()
                        return load
                else:
                    self._changed.wait()
            return None

    def _end(self, load: "_Load[T]", result: "T | BaseException") -> None:
        with self._changed:
            if load.given_up:
                self._hung -= 1
                return
            self._running = None
            if isinstance(result, BaseException):
                load.future.set_exception(result)
            else:
                load.future.set_result(result)
            os.eventfd_write(self._ended, 1)
            self._changed.notify_all()

    def _look(self) -> None:
        with self._changed:
            while not self._closed:
                if self._running is None or self._reader is None:
                    self._changed.wait()
                else:
                    self._look_at(self._running, self._reader)

    def _look_at(self, load: "_Load[T]", reader: Thread) -> None:
        """Give up `load` if its thread does not run for `hung_s`."""
        ran = _cpu_ticks(reader)
        for _ in range(LOOKS):
            ended = self._changed.wait_for(lambda: self._running is not load or self._closed, self.hung_s / LOOKS)
            now = _cpu_ticks(reader)
            if ended or now is None or now != ran:
                return
        self._give_up(load)

    def _give_up(self, load: "_Load[T]") -> None:
        load.given_up = True
        self._hung += 1
        self._running = self._reader = None
        silence = f"its file system has not answered for {self.hung_s:g} s"
        load.future.set_exception(BusyError(f"{load.what} cannot be loaded: {silence}"))
        try:
            if self._hung >= MAX_HUNG:
                raise BusyError(f"{self._hung} loads wait for a file system that hangs")
            self._start()
        except BusyError as error:
            self._refuse_queued(str(error))
        os.eventfd_write(self._ended, 1)

    def _refuse_queued(self, reason: str) -> None:
        while self._queued:
            load = self._queued.popleft()
            if load.future.set_running_or_notify_cancel():
                load.future.set_exception(BusyError(f"{load.what} cannot be loaded: {reason}"))


def _started(work: Callable[[], None], name: str) -> Thread:
    thread = Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def _cpu_ticks(thread: Thread) -> int | None:
    """CPU time of a thread of this process, in clock ticks. None while it cannot be read, for want of a descriptor."""
    try:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text("ascii", "replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
