"""Waits until the processes of `tandem up` serve.

Only a stall ends the wait: a process is not ready, its phase and its log do not change, and its session uses less than
one second of CPU time. A slow disk, a long compilation or a loaded machine delays a start and does not end it.

Polled are the progress file of each process, the size of its log, and once a second its CPU time. The /ready endpoints
are polled less and less often while nothing changes, because an answer costs CPU time as well.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from typing import Protocol
from urllib.parse import urlsplit

from tandem_engine.base.clock import Clock
from tandem_engine.base.progress import Phase, Progress, read_progress
from tandem_services.cli.processes import Child, Supervisor
from tandem_services.common.errors import StartupError

POLL_S = 0.1
CPU_PERIOD_S = 1.0
MAX_PROBE_PAUSE_S = 2.0
PROBE_TIMEOUT_S = 1.0

WORKING_CPU_S = 1.0
"""A process that used as much since its last progress is at work."""

MAX_BETWEEN_S = 1.0
"""Time between two turns that counts at most: when this process was stopped, the others may have been, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Readiness:
    """Of one process."""

    ready: bool
    reasons: tuple[str, ...] = ()
    """What is missing, as the process states it; empty without an answer."""


def readiness(url: str) -> Readiness:
    """The answer of a `/ready` endpoint of a process of ours; not ready where there is none. No proxy is asked."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", parts.path)
        answer = connection.getresponse()
        status, body = answer.status, answer.read()
    except (OSError, HTTPException):
        return Readiness(ready=False)
    finally:
        connection.close()
    if status == 200:
        return Readiness(ready=True)
    try:
        return Readiness(ready=False, reasons=tuple(map(str, json.loads(body)["reasons"])))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        return Readiness(ready=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One process, as a view shows it."""

    label: str
    phase: str
    doing: str
    """The phase, and how far it is."""
    share: float | None
    since_start_s: float
    in_phase_s: float
    ready: bool


class View(Protocol):
    """Shows a start."""

    def show(self, rows: Sequence[Row], now: float) -> None: ...


@dataclass(kw_only=True, slots=True)
class Watched:
    """One process until it is ready."""

    child: Child
    label: str
    url: str
    after: tuple[str, ...] = ()
    """Labels of those that must be ready first; until then this one cannot stall."""
    began: float = 0.0
    ready_after_s: float | None = None
    quiet_s: float = 0.0
    """Since its last progress."""
    probe_at: float = 0.0
    reasons: tuple[str, ...] = ()
    progress: Progress = field(default_factory=lambda: Progress(phase=Phase.IMPORTS))
    _phase_began: float | None = None
    _log_bytes: int = 0
    _cpu_s: float = 0.0

    @property
    def doing(self) -> str:
        """The phase, and how far it is."""
        return "; ".join(self.reasons) if self._shows_reasons else str(self.progress)

    @property
    def _shows_reasons(self) -> bool:
        silent = self.child.progress is None or self.progress.phase == Phase.REGISTRATION
        return silent and bool(self.reasons)

    def observe(self, cpu_s: float | None, *, elapsed_s: float, now: float) -> bool:
        """Note what it did; `cpu_s`: of its session, None where not measured now. Returns whether there is news."""
        progress = None if self.child.progress is None else read_progress(self.child.progress)
        progress = progress or self.progress
        log_bytes = self.child.log_bytes()
        news = progress != self.progress or log_bytes != self._log_bytes
        if self._phase_began is None or progress.phase != self.progress.phase:
            self._phase_began = now
        self.progress, self._log_bytes = progress, log_bytes
        worked = self._has_worked(cpu_s)
        self.quiet_s = 0.0 if news or worked else self.quiet_s + elapsed_s
        return news

    def _has_worked(self, cpu_s: float | None) -> bool:
        if cpu_s is None:
            return False
        worked = cpu_s - self._cpu_s >= WORKING_CPU_S
        # Less: a process of the session has ended, and its parent has not waited for it.
        if worked or cpu_s < self._cpu_s:
            self._cpu_s = cpu_s
        return worked

    def row(self, now: float) -> Row:
        ready = self.ready_after_s is not None
        return Row(
            label=self.label,
            phase="ready" if ready else self.doing if self._shows_reasons else self.progress.phase,
            doing="ready" if ready else self.doing,
            share=1.0 if ready else self.progress.share,
            since_start_s=now - self.began if self.ready_after_s is None else self.ready_after_s,
            in_phase_s=now - (self.began if self._phase_began is None else self._phase_began),
            ready=ready,
        )


@dataclass(kw_only=True, slots=True)
class StartWatch:
    """Waits for `watched`. `run` once."""

    watched: Sequence[Watched]
    supervisor: Supervisor
    view: View
    clock: Clock
    sleep: Callable[[float], object]
    probe: Callable[[str], Readiness]
    cpu_seconds: Callable[[Collection[int]], Mapping[int, float]]
    restarting: Callable[[str], object]
    """Called with a line for each process that ends and starts again."""
    stall_s: float
    limit_s: float | None = None
    """Of the whole start, however busy it is."""
    _serves: bool = field(default=False, init=False)
    """The gateway has been ready."""
    _began: float = field(default=0.0, init=False)
    _last_turn: float = field(default=0.0, init=False)
    _cpu_at: float = field(default=0.0, init=False)

    def run(self) -> None:
        """Return when all are ready.

        Raises:
            StartupError: a process has ended or made no progress, or the limit is over.
            ConfigError: a process has ended because of a flag.
        """
        self._began = self._last_turn = self._cpu_at = self.clock.now()
        for each in self.watched:
            each.began = self._began
        while self._waiting():
            self._turn()
            self.sleep(POLL_S)

    def _waiting(self) -> list[Watched]:
        return [each for each in self.watched if each.ready_after_s is None]

    def _turn(self) -> None:
        now = self.clock.now()
        elapsed_s, self._last_turn = min(now - self._last_turn, MAX_BETWEEN_S), now
        cpu = self._cpu(now)
        for each in self._waiting():
            news = each.observe(cpu.get(each.child.session), elapsed_s=elapsed_s, now=now)
            if news or now >= each.probe_at:
                self._probe_ready(each, now)
        self._keep_alive()
        self.view.show([each.row(now) for each in self.watched], now)
        self._require_progress()
        self._require_in_time(now)

    def _keep_alive(self) -> None:
        """A process that ends also ends the start. Once the gateway serves, each starts again, the gateway too."""
        self._serves |= any(each.after and each.ready_after_s is not None for each in self.watched)
        doing = {each.child.name: each.doing for each in self._waiting()}
        self.supervisor.require_alive(doing, others_serve=self._serves)
        if not self._serves:
            return
        for event in self.supervisor.restart_dead():
            self.restarting(event)
            for each in self.watched:
                if each.child.status is not None:
                    each.ready_after_s, each.probe_at = None, 0.0

    def _cpu(self, now: float) -> Mapping[int, float]:
        if now < self._cpu_at:
            return {}
        self._cpu_at = now + CPU_PERIOD_S
        return self.cpu_seconds([each.child.session for each in self._waiting()])

    def _probe_ready(self, each: Watched, now: float) -> None:
        answer = self.probe(each.url)
        each.probe_at = now + min(max(POLL_S, each.quiet_s / 10), MAX_PROBE_PAUSE_S)
        each.reasons = answer.reasons
        if answer.ready:
            each.ready_after_s = self.clock.now() - self._began

    def _require_progress(self) -> None:
        waiting = self._waiting()
        labels = {each.label for each in waiting}
        for each in waiting:
            if labels.intersection(each.after):
                each.quiet_s = 0.0
            elif each.quiet_s >= self.stall_s:
                raise StartupError(
                    f"{each.label} made no progress for {self.stall_s:g} s while starting ({each.doing}); "
                    f"{each.child.last_line()} (log: {each.child.log_place}). Wait longer with --stall-timeout"
                )

    def _require_in_time(self, now: float) -> None:
        waiting = self._waiting()
        if waiting and self.limit_s is not None and now - self._began > self.limit_s:
            missing = ", ".join(f"{each.label} ({each.doing})" for each in waiting)
            logs = ", ".join(each.child.log_place for each in waiting)
            raise StartupError(
                f"not ready after {self.limit_s:g} s: {missing}; logs: {logs}. Without --ready-timeout only a process "
                "that makes no progress ends a start"
            )
