"""The processes that `tandem up` starts, watches, restarts and stops, and the signals that end it.

Life of a process
    start      argv without a shell, output to a pipe (`logs.pump`), killed by the kernel when the parent dies
    exit while starting up   the whole start-up fails, with the reason it gave or the last lines of its log. Once the
               gateway has served with others, the process is restarted instead, at most `MAX_RESTARTS` times
    exit while serving       restarted after a pause that doubles from 1 s to 30 s
    stop       SIGTERM in reverse order of start: finish what runs. SIGINT after the grace period: end now.
               SIGKILL for what is left then. What the others use until their end (Redis) is stopped after them
The first signal to `tandem up` lets running requests finish, the second ends everything now.

/proc tells one process from another of the same number (`Identity`), and how much CPU time each has used.
"""

import contextlib
import hashlib
import math
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tandem_engine.base.cgroups import memory_kills, memory_shortage
from tandem_engine.base.errors import ConfigError
from tandem_engine.base.linux import die_with_parent
from tandem_services.cli.logs.pump import LogPump, Output
from tandem_services.common.errors import StartupError
from tandem_services.common.tasks import ending_signals

PROC = Path("/proc")

_STATE, _SESSION, _UTIME, _STIME, _CUTIME, _CSTIME, _STARTED = 0, 3, 11, 12, 13, 14, 19
"""Of the fields of /proc/PID/stat after the name: 3, 6, 14 to 17 and 22 of proc(5)."""


def session_cpu_seconds(sessions: Collection[int], proc: Path = PROC) -> Mapping[int, float]:
    """CPU time by session id: of its processes, and of those of their children that have ended.

    0 where a session has no process, or where the system has no /proc.
    """
    ticks: defaultdict[int, int] = defaultdict(int)
    for folder in proc.glob("[0-9]*"):
        fields = _stat(folder)
        if fields is not None and (session := int(fields[_SESSION])) in sessions:
            ticks[session] += sum(int(fields[at]) for at in (_UTIME, _STIME, _CUTIME, _CSTIME))
    per_second = os.sysconf("SC_CLK_TCK")
    return {session: ticks[session] / per_second for session in sessions}


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Of one process, among all that had or will have its number, over restarts of the machine too."""

    pid: int
    started: int
    """Ticks since the machine started."""
    boot: str
    command: str
    """Digest of its command line, which may hold a password."""

    @classmethod
    def of(cls, pid: int, proc: Path = PROC) -> "Identity | None":
        """None where there is no such process, or it has ended and waits for its parent."""
        fields = _stat(proc / str(pid))
        if fields is None or fields[_STATE] in "ZX":
            return None
        try:
            command = (proc / str(pid) / "cmdline").read_bytes()
            boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return None
        return cls(pid=pid, started=int(fields[_STARTED]), boot=boot, command=hashlib.sha256(command).hexdigest())

    @property
    def is_running(self) -> bool:
        """Whether the number still means this process."""
        return Identity.of(self.pid) == self


def _stat(folder: Path) -> list[str] | None:
    try:
        return (folder / "stat").read_text("ascii", "replace").rpartition(")")[2].split()
    except OSError:  # it has ended
        return None


FIRST_PAUSE = 1.0
MAX_PAUSE = 30.0

STABLE_AFTER = 60.0
"""A process that ran this long starts again with the first pause."""

HURRY_SECONDS = 5.0
"""From SIGINT to SIGKILL: time to abort requests and to close sockets."""

POLL_SECONDS = 0.02

UNWATCHED_SECONDS = 0.1
"""Between two looks at a child that cannot be waited for."""

USAGE = 2
"""Exit status of a process whose flags cannot work."""

REFUSALS = (USAGE, 3)
"""And of a worker whose engine refuses model or flags."""

MAX_RESTARTS = 3
"""Of one process before all are ready."""

_REASON = re.compile(r"(?:\bERROR +\S+|^[\d:.]+ tandem(?:-engine)?: error:) (.+)$", re.MULTILINE)
"""An error in a child's log, from its logger or from its command line."""


@dataclass(kw_only=True, slots=True)
class Child:
    """One process and the command that starts it again."""

    name: str
    argv: Sequence[str]
    log: Path
    process: "subprocess.Popen[bytes] | None" = None
    started_at: float = 0.0
    pause: float = FIRST_PAUSE
    restart_at: float | None = None
    restarts: int = 0
    outlives_others: bool = False
    """Stopped once the others are gone."""
    progress: Path | None = None
    """File in which it reports what it does until it serves (`base.progress`)."""
    pump: LogPump = field(default_factory=LogPump)
    output: Output | None = None

    def start(self) -> None:
        if self.progress is not None:
            self.progress.unlink(missing_ok=True)
        writing, self.output = self.pump.open(self.name, self.log)
        try:
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_become_child,  # noqa: PLW1509  only prctl and sigaction run between fork and exec
            )
        finally:
            os.close(writing)
        self.started_at = time.monotonic()
        self.restart_at = None

    @property
    def status(self) -> int | None:
        """Exit status, None while running."""
        return None if self.process is None else self.process.poll()

    @property
    def may_restart(self) -> bool:
        """Whether another start may do better: it was not refused for what it was given."""
        return self.status not in REFUSALS and self.restarts < MAX_RESTARTS

    @property
    def session(self) -> int:
        """Id of the session that it leads; 0 before the first start."""
        return 0 if self.process is None else self.process.pid

    @property
    def log_place(self) -> str:
        """Where its output can be read."""
        return str(self.log) if self.pump.writes_files else "standard output"

    def log_bytes(self) -> int:
        """Bytes that it has written since its start."""
        return 0 if self.output is None else self.output.received

    def last_line(self) -> str:
        """A clause with the last line that it wrote."""
        last = next((line.strip() for line in reversed(self._written().split("\n")) if line.strip()), "")
        return f"the last line of its log: {last}" if last else "its log is empty"

    def last_log_lines(self, lines: int = 5) -> str:
        """The first error it logged on purpose; without one, or after a crash, the end of its log."""
        text = self._written().strip()
        reason = _REASON.search(text)
        if reason is not None and "Traceback" not in text:
            return f": {reason[1]} (log: {self.log_place})"
        tail = "\n".join(f"  {line}" for line in text.splitlines()[-lines:])
        return f"; the end of {self.log_place}:\n{tail}"

    def _written(self) -> str:
        """The end of what it has written since its start."""
        self.pump.settle()
        return "" if self.output is None else self.output.tail.decode("utf-8", "replace")


def _become_child() -> None:
    """Between fork and exec. A child takes the SIGINT of its supervisor, also where that one ignores its own."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()


@dataclass(kw_only=True, slots=True)
class Supervisor:
    """All children, in the order they were started."""

    children: list[Child] = field(default_factory=list)
    pump: LogPump = field(default_factory=LogPump)
    memory_kills: int = field(default_factory=memory_kills)
    """`cgroups.memory_kills` when a child was last found dead."""

    def start(self, child: Child) -> None:
        child.pump = self.pump
        child.start()
        self.children.append(child)

    def require_alive(self, doing: Mapping[str, str] | None = None, *, others_serve: bool = False) -> None:
        """Raise `StartupError` naming the first process that has exited; `ConfigError` where a flag was at fault.

        `doing`: what each was doing, by name, for the sentence. `others_serve`: one that `restart_dead` can start again
        is passed over, unless it has failed `MAX_RESTARTS` times.
        """
        for child in self.children:
            if child.status is not None and not (others_serve and child.may_restart):
                problem = StartupError if child.status != USAGE else ConfigError
                phase = (doing or {}).get(child.name)
                ended = _describe(child.status, for_memory=self._killed_for_memory())
                what = f"{ended} while starting{f' ({phase})' if phase else ''}"
                raise problem(f"{child.name} {what}{child.last_log_lines()}")

    def restart_dead(self) -> list[str]:
        """Start again what died and has waited its pause. Returns a line for each event."""
        events = []
        now = time.monotonic()
        for_memory: bool | None = None  # read once: the kernel may have killed several
        for child in self.children:
            status = child.status
            if status is None:
                continue
            if child.restart_at is None:
                if now - child.started_at > STABLE_AFTER:
                    child.pause = FIRST_PAUSE
                child.restart_at, place = now + child.pause, child.log_place
                for_memory = self._killed_for_memory() if for_memory is None else for_memory
                ended = _describe(status, for_memory=for_memory)
                events.append(f"{child.name} {ended}; restarting in {child.pause:g} s (log: {place})")
                child.pause = min(child.pause * 2, MAX_PAUSE)
            elif now >= child.restart_at:
                events.append(self._restart(child, now))
        return events

    def keep_serving(self, restarted: Callable[[str], None], look_s: float) -> NoReturn:
        """Restart what dies, until a signal raises. `restarted` gets a line for each event. No error ends what serves:
        it is reported, and the children are looked at again."""
        while True:
            try:
                for event in self.restart_dead():
                    restarted(event)
                self.wait(look_s)
            except Exception as error:  # noqa: BLE001  # the boundary of what watches
                with contextlib.suppress(OSError, ValueError):  # standard error is closed
                    reason = f"{type(error).__name__}: {error}"
                    print(f"tandem: cannot watch its processes, trying again: {reason}", file=sys.stderr, flush=True)
                time.sleep(UNWATCHED_SECONDS)

    def _restart(self, child: Child, now: float) -> str:
        """A line about it. At a limit of processes or memory no process can be started for now; the others serve."""
        try:
            child.start()
        except Exception as error:  # noqa: BLE001  # the boundary between children: `subprocess` raises its own, too
            child.restart_at = now + child.pause
            reason = error.strerror if isinstance(error, OSError) else error
            line = f"{child.name} cannot be started ({reason}); trying again in {child.pause:g} s"
            child.pause = min(child.pause * 2, MAX_PAUSE)
            return line
        child.restarts += 1
        return f"{child.name} restarted"

    def wait(self, limit_s: float) -> None:
        """Sleep until a child has ended, or may be started again, at most for `limit_s`. Signals interrupt it.

        An end is noticed after `UNWATCHED_SECONDS` where the kernel has no descriptors of processes for us.
        """
        now, ended = time.monotonic(), select.poll()
        with contextlib.ExitStack() as opened:
            for child in self.children:
                if child.process is None:
                    continue
                if child.status is not None:
                    limit_s = min(limit_s, max(0.0, (child.restart_at or now) - now))
                    continue
                try:
                    descriptor = os.pidfd_open(child.process.pid)
                except OSError:  # before Linux 5.3, in some sandboxes, and at the limit of open files
                    limit_s = min(limit_s, UNWATCHED_SECONDS)
                    continue
                opened.callback(os.close, descriptor)
                ended.register(descriptor, select.POLLIN)
            ended.poll(math.ceil(limit_s * 1000))

    def _killed_for_memory(self) -> bool:
        """Whether the kernel has killed since the last call. A worker whose engine was killed exits by itself, and
        that kill must not explain a later one.
        """
        before, self.memory_kills = self.memory_kills, memory_kills()
        return self.memory_kills > before

    def stop(self, grace: float, *, hurried: Callable[[], bool] = lambda: False) -> None:
        """End every child; returns when all are gone.

        Running requests have `grace` seconds to finish, or until `hurried`.
        """
        _stop([child for child in self.children if not child.outlives_others], grace, hurried)
        _stop([child for child in self.children if child.outlives_others], grace, hurried)
        self.pump.close()


def _stop(children: Sequence[Child], grace: float, hurried: Callable[[], bool]) -> None:
    for number, timeout in ((signal.SIGTERM, grace), (signal.SIGINT, HURRY_SECONDS), (signal.SIGKILL, None)):
        for child in reversed(children):
            if child.process is not None and child.status is None:
                child.process.send_signal(number)
        if _gone_within(children, timeout, hurried if number == signal.SIGTERM else lambda: False):
            return


def _describe(status: int, *, for_memory: bool) -> str:
    if status >= 0:
        return f"exited with status {status}"
    if status == -signal.SIGKILL and for_memory:
        return f"was killed by the kernel because {memory_shortage()}"
    return f"was killed by {signal.Signals(-status).name}"


def _gone_within(children: Sequence[Child], timeout: float | None, hurried: Callable[[], bool]) -> bool:
    """Whether every child has exited before `timeout` is over or `hurried`; None waits as long as it takes."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while any(child.process is not None and child.status is None for child in children):
        if hurried() or (deadline is not None and time.monotonic() >= deadline):
            return False
        time.sleep(POLL_SECONDS)
    return True


def python_command(*args: str) -> list[str]:
    """A `tandem` subcommand as a process of this interpreter."""
    return [sys.executable, "-m", "tandem_services.cli.main", *args]


@dataclass(slots=True)
class Ending:
    """Of one `tandem up`. The first signal raises `KeyboardInterrupt` with its number."""

    _stopping: bool = False
    _hurried: bool = False

    def watch_signals(self) -> None:
        """Take signals from now on."""
        for number in ending_signals():
            signal.signal(number, self._take)

    def stop(self, supervisor: Supervisor, grace: float, *, notify: Callable[[], None]) -> None:
        """Stop the processes; running requests have `grace` seconds, or until a further SIGINT or SIGTERM arrives.

        `notify`: called first, when a signal no longer interrupts.
        """
        self._stopping = True
        notify()
        supervisor.stop(grace, hurried=lambda: self._hurried)

    def _take(self, number: int, _: FrameType | None) -> None:
        if not self._stopping:
            self._stopping = True
            raise KeyboardInterrupt(number)
        # A terminal that is closed sends SIGHUP twice.
        self._hurried |= number != signal.SIGHUP


def how_to_end() -> str:
    """For the user of this process, which may have been started to ignore Ctrl-C."""
    return "Ctrl-C" if signal.SIGINT in ending_signals() else f"kill {os.getpid()}"
