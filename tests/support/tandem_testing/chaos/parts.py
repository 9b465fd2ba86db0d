"""The processes of a fleet, one by one: how each is started again, and how it can be hurt.

Part      a process and the command that starts it
Worker    a part whose process has an engine below it
Gateway   a part that clients talk to
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem_engine.base.linux import die_with_parent
from tandem_testing.chaos.knobs import RAISED, KnobFile
from tandem_testing.chaos.namespaces import Namespace
from tandem_testing.chaos.worker_main import WorkerSettings
from tandem_testing.raised_in_processes import RemoteFaults
from tandem_testing.tcp_proxy import TcpProxy

SUPPORT = str(Path(__file__).parents[2])
"""Where this package is: it is not installed, and the processes of a fleet need it."""


@dataclass(kw_only=True, slots=True)
class Part:
    """One process and the command that starts it again."""

    name: str
    argv: Sequence[str]
    log: Path
    kept: bool = True
    """The keeper restarts it."""
    process: "subprocess.Popen[bytes] | None" = None
    starts: int = 0
    last_status: int | None = None
    """Exit status of the process before this one."""
    ended_at: float = 0.0
    """When the keeper found that process dead; monotonic seconds."""
    before_exec: Callable[[], None] = die_with_parent

    def start(self) -> None:
        if self.process is not None:
            self.last_status = self.process.returncode
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (SUPPORT, os.environ.get("PYTHONPATH"))))},
                preexec_fn=self.before_exec,  # noqa: PLW1509  only prctl and setrlimit run between fork and exec
            )
        self.starts += 1

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} has not been started"
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        if self.alive:
            os.kill(self.pid, number)

    def end(self) -> None:
        """SIGKILL, and wait until it is gone. Idempotent."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def log_size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def log_text(self, since: int = 0) -> str:
        """Its log from byte `since` on."""
        return self.log.read_bytes()[since:].decode("utf-8", "replace") if self.log.exists() else ""


@dataclass(kw_only=True, slots=True)
class Worker:
    """One worker: a service process with an engine process below it."""

    part: Part
    role: str
    url: str
    knobs: KnobFile
    settings: WorkerSettings
    request_line: TcpProxy | None = None
    """From gateways to its engine, in a proxied fleet."""
    peer_line: TcpProxy | None = None
    place: Namespace | None = None
    """Its network namespace, in a wired fleet."""

    @property
    def id(self) -> str:
        return self.part.name

    def faults(self, process: str) -> RemoteFaults:
        """Of `ENGINE` or `WORKER`, in a fleet whose functions may be made to raise."""
        return RemoteFaults(self.knobs.path.with_suffix(RAISED) / process)

    def engine_pids(self) -> list[int]:
        """Of the engine; more than one with several ranks."""
        try:
            children = Path(f"/proc/{self.part.pid}/task/{self.part.pid}/children").read_text("ascii")
        except FileNotFoundError:
            return []
        return [int(pid) for pid in children.split()]

    def signal_engine(self, number: signal.Signals) -> None:
        for pid in self.engine_pids():
            os.kill(pid, number)

    def kill(self) -> None:
        """SIGKILL both processes, as when a pod vanishes."""
        engines = self.engine_pids()
        self.part.send(signal.SIGKILL)
        for pid in engines:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_service(self) -> None:
        self.part.send(signal.SIGKILL)

    def kill_engine(self) -> None:
        self.signal_engine(signal.SIGKILL)

    def freeze(self) -> None:
        self.part.send(signal.SIGSTOP)
        self.signal_engine(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal_engine(signal.SIGCONT)
        self.part.send(signal.SIGCONT)


@dataclass(kw_only=True, slots=True)
class Gateway:
    part: Part
    url: str
