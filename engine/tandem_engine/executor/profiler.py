"""A trace of some steps, on demand, as a file for chrome://tracing or Perfetto.

    1. start   on the thread that runs forwards; kernels and operators of every thread are recorded from here on
    2. poll    once per iteration: after a number of steps or of seconds the trace ends
    3. stop    the file is written; nothing is computed until it is complete

A trace grows with every operator, so both bounds have a maximum. While off, the profiler costs one attribute access
per iteration.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from tandem_engine.base.clock import Clock
from tandem_engine.base.errors import BusyError, ConfigError
from tandem_engine.base.linux import PRIVATE_FOLDER

logger = logging.getLogger(__name__)
MAX_STEPS = 1000
MAX_SECONDS = 60.0
T = TypeVar("T")


class RunsOnForwardThread(Protocol):
    """The part of an executor that a profiler needs."""

    def run(self, function: Callable[[], T]) -> T:
        """Run `function` where forwards run, and wait for it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """A trace that is being recorded."""

    profiler: profile
    path: Path
    until_step: int
    until: float


class StepProfiler:
    """At most one trace at a time. Scheduler thread only."""

    def __init__(self, *, executor: RunsOnForwardThread, folder: Path | None, clock: Clock) -> None:
        """`folder` receives the files; None refuses to trace."""
        self._executor = executor
        self._folder = folder
        self._clock = clock
        self._trace: Trace | None = None
        self._number = 0

    @property
    def running(self) -> bool:
        return self._trace is not None

    def start(self, *, launched: int, steps: int, seconds: float) -> Path:
        """Record up to `steps` steps after step `launched`; returns the file that will hold them.

        Raises:
            ConfigError: there is no folder, it cannot be written, or a bound is out of range.
            BusyError: a trace is being recorded.
        """
        if self._folder is None:
            raise ConfigError("start the engine with --torch-profiler-dir DIR to have traces written there")
        if not 1 <= steps <= MAX_STEPS:
            raise ConfigError(f"steps must be between 1 and {MAX_STEPS}, got {steps}")
        if not 0.0 < seconds <= MAX_SECONDS:
            raise ConfigError(f"seconds must be more than 0 and at most {MAX_SECONDS:g}, got {seconds:g}")
        if self._trace is not None:
            raise BusyError(f"a trace is being recorded to {self._trace.path}: wait until it ends, or stop it")
        path = self._next_path(self._folder)
        profiler = self._executor.run(_start)
        self._trace = Trace(
            profiler=profiler, path=path, until_step=launched + steps, until=self._clock.now() + seconds
        )
        return path

    def poll(self, launched: int) -> Path | None:
        """End a trace whose time has come; returns its file. With no trace nothing happens."""
        trace = self._trace
        if trace is None or (launched < trace.until_step and self._clock.now() < trace.until):
            return None
        return self.stop()

    def stop(self) -> Path:
        """End the trace and write its file. Raises `BusyError` when none is recorded, `ConfigError` for a full disk."""
        trace, self._trace = self._trace, None
        if trace is None:
            raise BusyError("no trace is being recorded")
        try:
            self._executor.run(lambda: _stop(trace))
        except OSError as error:
            raise ConfigError(f"cannot write the trace {trace.path}: {error.strerror}") from error
        logger.info("trace written to %s", trace.path, extra={"fields": {"path": str(trace.path)}})
        return trace.path

    def _next_path(self, folder: Path) -> Path:
        try:
            folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--torch-profiler-dir {folder} cannot be written ({error.strerror})") from error
        while (path := folder / f"trace-{self._number}.json").exists():
            self._number += 1
        return path


def _start() -> profile:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities)
    profiler.start()
    return profiler


def _stop(trace: Trace) -> None:
    trace.profiler.stop()
    trace.profiler.export_chrome_trace(str(trace.path))
