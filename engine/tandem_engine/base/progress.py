"""What a process does until it serves: in a small file that the process which started it reads, or by calls.

`report` does nothing until `report_to` names a file or `also_to` a function: a further rank and an engine that serves
have neither.
"""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from tandem_engine.base.clock import Clock, MonotonicClock

logger = logging.getLogger(__name__)

PERIOD_S = 0.1
"""Between two writes of bytes; the other phases have little to count."""

MAX_FILE_BYTES = 4096
GIB = 1 << 30


class Phase(StrEnum):
    """Of a start, in the usual order."""

    IMPORTS = "imports"
    WEIGHTS = "weights"
    HUGE_PAGES = "huge pages"
    MEMORY = "memory"
    SELF_TEST = "self-test"
    KERNELS = "kernels"
    REGISTRATION = "registration"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """One phase, and how far it is."""

    phase: str
    done: int = 0
    total: int = 0
    """0: not known."""
    unit: str = ""
    """`bytes`, or "" for a count."""

    @property
    def share(self) -> float | None:
        """0 to 1; None where the total is not known."""
        return min(1.0, self.done / self.total) if self.total > 0 else None

    def __str__(self) -> str:
        if self.share is None:
            return self.phase
        if self.unit == "bytes":
            return f"{self.phase} {100 * self.share:.0f} % of {self.total / GIB:.2f} GiB"
        return f"{self.phase} {self.done} of {self.total}"


class Pace:
    """Which reports are due: at once, but bytes of one phase once in `PERIOD_S` and at their end."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last: tuple[Progress, float] | None = None

    def take(self, progress: Progress) -> bool:
        """Whether it is due now; it then counts as the last."""
        due = self._is_due(progress)
        if due:
            self._last = progress, self._clock.now()
        return due

    def _is_due(self, progress: Progress) -> bool:
        if self._last is None or progress.unit != "bytes" or progress.done == progress.total:
            return True
        if self._last[0].phase != progress.phase:
            return True
        return self._clock.now() - self._last[1] >= PERIOD_S


class ProgressFile:
    """Writes the latest `Progress`. Any thread may report."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._pace = Pace(clock)
        self._lock = threading.Lock()
        self._failed = False

    def write(self, progress: Progress) -> None:
        """If it is due."""
        with self._lock:
            if self._failed or not self._pace.take(progress):
                return
            new = new_name(self._path)
            try:
                new.write_text(json.dumps(asdict(progress)))
                new.replace(self._path)
            except OSError as error:
                # The start does not depend on it; a full disk may be one that only holds logs.
                self._failed = True
                logger.warning("cannot report the progress of this start: %s", error)


def new_name(path: Path) -> Path:
    """What a progress file is called while it is written."""
    return path.with_name(f"{path.name}.new")


class Reporter:
    """The progress of this process."""

    def __init__(self) -> None:
        self._file: ProgressFile | None = None
        self._callback: Callable[[Progress], object] | None = None
        self._callback_pace = Pace(MonotonicClock())
        self._kernels_found_missing = 0
        self._kernels_compiled = 0

    def report_to(self, path: Path | None, clock: Clock | None = None) -> None:
        """Write there from now on; None ends it."""
        self._file = None if path is None else ProgressFile(path, clock or MonotonicClock())
        self._kernels_found_missing = self._kernels_compiled = 0

    @contextmanager
    def also_to(self, callback: Callable[[Progress], object], clock: Clock | None = None) -> Iterator[None]:
        """Call `callback` for each report that is due, on the thread that reports. What it raises ends the start."""
        former = self._callback, self._callback_pace
        self._callback, self._callback_pace = callback, Pace(clock or MonotonicClock())
        self._kernels_found_missing = self._kernels_compiled = 0
        try:
            yield
        finally:
            self._callback, self._callback_pace = former

    def report(self, phase: Phase, *, done: int = 0, total: int = 0, unit: str = "") -> None:
        """The process is in `phase`."""
        progress = Progress(phase=phase, done=done, total=total, unit=unit)
        if self._file is not None:
            self._file.write(progress)
        if self._callback is not None and self._callback_pace.take(progress):
            self._callback(progress)

    def kernel_missing(self) -> None:
        """A kernel is about to be compiled."""
        self._kernels_found_missing += 1
        self._report_kernels()

    def kernel_compiled(self) -> None:
        """One that was missing is there."""
        self._kernels_compiled += 1
        self._report_kernels()

    def _report_kernels(self) -> None:
        # Of how many is not known before each was called; those found missing so far are a lower bound.
        self.report(Phase.KERNELS, done=self._kernels_compiled, total=self._kernels_found_missing)


START = Reporter()
"""Of this process."""


def read_progress(path: Path) -> Progress | None:
    """The latest that was written; None where there is nothing yet, or nothing that can be read."""
    try:
        with path.open("rb") as opened:
            fields = json.loads(opened.read(MAX_FILE_BYTES))
        return Progress(
            phase=str(fields["phase"]), done=int(fields["done"]), total=int(fields["total"]), unit=str(fields["unit"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
