"""Cases of one part, in its process: each is done once, and what raises costs itself alone.

An error of the device costs the process too, for nothing can be computed in it after it: the runner starts the part
again after the case. A case that does not end is ended with the process, which prints where it stood.
"""

import faulthandler
import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from gpu.control.lines import Begin, End, Figure, Line, LineFile, Measured, Missing, ended
from gpu.figures import figure_row

LIMIT_FACTOR, MIN_LIMIT_S = 5.0, 90.0
"""A case may take so many times what it should, and this long in any case."""


class DeviceLostError(Exception):
    """The device has failed in a case; this process can do nothing more with it."""


@dataclass(kw_only=True)
class Record:
    """Where a part's cases are written, and until when there is time for them."""

    part: str
    lines: LineFile
    ends_at: float
    """By `time.monotonic`."""
    limit: Callable[[float], AbstractContextManager[object]] = nullcontext
    """What keeps a case within so many seconds."""
    postponed: list[str] = field(default_factory=list)
    """Cases for which there was no time."""
    _done: set[str] = field(init=False)
    _case: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._done = ended(self.lines.read(), self.part)

    @property
    def left_s(self) -> float:
        return self.ends_at - time.monotonic()

    def wants(self, case: str, *, needs_s: float = 0.0) -> bool:
        """Whether a case is neither done nor too long for the time left; it is remembered if it is too long."""
        if case in self._done:
            return False
        if self.left_s >= needs_s:
            return True
        why = f"about {needs_s:.0f} s needed, {max(0.0, self.left_s):.0f} s left"
        self.write(Missing(part=self.part, case=case, why=why, failed=False))
        self.postponed.append(case)
        return False

    def case(self, name: str, measure: Callable[[], None], *, needs_s: float = 5.0) -> None:
        """Do it if it is wanted. Raises `DeviceLostError` when the device has failed in it."""
        if not self.wants(name, needs_s=needs_s):
            return
        self.write(Begin(part=self.part, case=name))
        self._case = name
        began = time.monotonic()
        with self.limit(max(MIN_LIMIT_S, LIMIT_FACTOR * needs_s)):
            lost = self._done_in(name, measure)
        self._done.add(name)
        self.write(End(part=self.part, case=name, seconds=round(time.monotonic() - began, 3)))
        if lost:
            raise DeviceLostError(name)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _done_in(self, name: str, measure: Callable[[], None]) -> bool:
        """Whether the device was lost."""
        try:
            measure()
        except Exception as error:  # noqa: BLE001 - the boundary: figures of other cases mean what they did
            self.failed(name, error)
            return _lost(error)
        return False

    def add(self, figure: Figure) -> None:
        """A figure of the case that is being done."""
        self.write(Measured(part=self.part, case=self._case, figure=figure))
        sys.stderr.write(f"{figure_row(figure)}\n")
        sys.stderr.flush()

    def missing(self, what: str, why: str, *, failed: bool = True) -> None:
        self.write(Missing(part=self.part, case=what, why=why, failed=failed))
        sys.stderr.write(f"not measured: {what}: {why}\n")
        sys.stderr.flush()

    def failed(self, what: str, error: Exception) -> None:
        """Its traceback is on standard error."""
        traceback.print_exception(error)
        first = (str(error).splitlines() or [""])[0]
        self.missing(what, f"{type(error).__name__}: {first[:300]}")

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """A piece of a case that may fail alone."""
        try:
            yield
        except Exception as error:
            if _lost(error):
                raise
            self.failed(what, error)

    def write(self, line: Line) -> None:
        self.lines.write(line)


@contextmanager
def ended_at(limit_s: float) -> Iterator[None]:
    """Ends the process, with a trace of where it stands, when what is within does not end in time."""
    faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _lost(error: Exception) -> bool:
    return isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError)
