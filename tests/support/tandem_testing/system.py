"""A whole Tandem on this machine, started by the command that people use.

    1. start     `tandem up` with the flags given, on a free port; returns once its greeting has named the URL
    2. use       over HTTP, as a client or an operator; faults by the pid of any of its processes
    3. close     SIGINT and, whatever became of it, SIGKILL for every process that is left

All processes inherit a mark in their environment. It finds them however they were started or restarted, and
tells whether one has outlived the system.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem_engine.base.addresses import Address
from tandem_testing.inherited_signals import stop_ignoring_signals
from tandem_testing.waiting import wait_for

START_TIMEOUT_S = 200.0
"""The first start of a checkout compiles, in each of its processes, what the next ones find in the cache."""
STOP_TIMEOUT_S = 60.0
MARK = "SYSTEM_UNDER_TEST"


def tandem_command(*args: str) -> list[str]:
    """`tandem` with this interpreter."""
    return [sys.executable, "-m", "tandem_services.cli.main", *args]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningProcess:
    """One process of a system, as /proc shows it."""

    pid: int
    argv: tuple[str, ...]

    def flag(self, name: str) -> str | None:
        """Value of a command-line flag."""
        return self.argv[self.argv.index(name) + 1] if name in self.argv else None


@dataclass(kw_only=True, slots=True)
class System:
    """Processes are looked up when asked for: `tandem up` may have restarted them."""

    process: "subprocess.Popen[bytes]"
    run_dir: Path
    mark: str
    url: str = ""
    workers: dict[str, str] = field(default_factory=dict)
    """Worker id → URL of its health port. Both outlive a restart."""
    viewed: frozenset[int] = frozenset()
    """Pids of the last time that a `SystemClient` found all of them in the gateway's view."""

    @classmethod
    def start(cls, run_dir: Path, *flags: str, env: Mapping[str, str] | None = None) -> "System":
        """Raises `AssertionError` with the logs when it does not come up. `env` adds to this environment."""
        system = cls.launch(run_dir, *flags, env=env)
        try:
            system.wait_until_up()
        except BaseException:
            system.close()
            raise
        return system

    @classmethod
    def launch(
        cls, run_dir: Path, *flags: str, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> "System":
        """Only start the command; `wait_until_up` follows. `prefix`: a command that starts it, such as `prlimit`."""
        mark = uuid.uuid4().hex
        run_dir.mkdir(parents=True, exist_ok=True)
        run_dir = run_dir.resolve()
        with (run_dir / "up.out").open("wb") as out:
            process = subprocess.Popen(
                [*prefix, *tandem_command("up", "--port", "0", "--run-dir", str(run_dir), *flags)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | {MARK: mark} | dict(env or {}),
                # `close` sends SIGINT, which the job of a shell in the background ignores.
                preexec_fn=stop_ignoring_signals,  # noqa: PLW1509  # only sets handlers
            )
        return cls(process=process, run_dir=run_dir, mark=mark)

    def wait_until_up(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait for the greeting, which comes when every worker is registered."""

        def greeted() -> bool:
            assert self.process.poll() is None, f"tandem up ended with {self.process.returncode}\n{self.logs()}"
            found = re.search(r"^Tandem serves \S+ at (\S+)$", self._printed(), re.MULTILINE)
            self.url = found[1] if found else ""
            return found is not None

        wait_for(greeted, timeout_s, self.logs)
        services = [p for p in self.processes() if _is_part(p, "tandem_services.cli.main", "worker")]
        self.workers = {
            str(p.flag("--worker-id")): Address(str(p.flag("--health-host")), int(str(p.flag("--health-port")))).url()
            for p in services
        }

    def processes(self) -> list[RunningProcess]:
        """All that carry the mark, `tandem up` itself excepted."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if not self._owns(folder):
                    continue
                argv = (folder / "cmdline").read_bytes().decode().split("\0")[:-1]
            except (FileNotFoundError, ProcessLookupError, PermissionError):  # gone, or not ours
                continue
            if argv and int(folder.name) != self.process.pid:
                found.append(RunningProcess(pid=int(folder.name), argv=tuple(argv)))
        return found

    def service_pid(self, worker_id: str) -> int:
        """The worker service."""
        return self._pid("tandem_services.cli.main", "worker", worker_id)

    def engine_pid(self, worker_id: str) -> int:
        """The engine of a worker service."""
        return self._pid("tandem_engine.cli", "serve", worker_id)

    def gateway_pid(self) -> int:
        return self._pid("tandem_services.cli.main", "gateway", None)

    def redis_pid(self) -> int:
        return next(p.pid for p in self.processes() if "redis-server" in p.argv[0])

    def kill(self, pid: int) -> None:
        """SIGKILL one process; returns when it is gone."""
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: all(process.pid != pid for process in self.processes()), STOP_TIMEOUT_S)

    @contextlib.contextmanager
    def no_restarts(self) -> Iterator[None]:
        """`tandem up` is paused: what dies stays dead."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def interrupt(self) -> int:
        """Ctrl-C; returns the exit status of `tandem up`."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(STOP_TIMEOUT_S)

    def close(self) -> None:
        """End everything, by pid. Idempotent."""
        try:
            if self.process.poll() is None:
                self.interrupt()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        finally:
            for left in self.processes():
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(left.pid, signal.SIGKILL)

    def logs(self, lines: int = 25) -> str:
        """The end of every log, for a test that has failed."""
        logs = [self.run_dir / "up.out", *sorted(self.run_dir.glob("*.log"))]
        tails = {log.name: log.read_text("utf-8", "replace").splitlines()[-lines:] for log in logs}
        return "\n".join(f"--- {name}\n" + "\n".join(tail) for name, tail in tails.items())

    def _owns(self, process: Path) -> bool:
        # redis-server writes its title over its environment, but works in the run folder.
        marked = f"{MARK}={self.mark}".encode() in (process / "environ").read_bytes().split(b"\0")
        return marked or (process / "cwd").readlink() == self.run_dir

    def _printed(self) -> str:
        return (self.run_dir / "up.out").read_text("utf-8", "replace")

    def _pid(self, module: str, command: str, worker_id: str | None) -> int:
        pids = [p.pid for p in self.processes() if _is_part(p, module, command) and p.flag("--worker-id") == worker_id]
        assert len(pids) == 1, f"{command} {worker_id or ''} has the processes {pids}"
        return pids[0]


def _is_part(process: RunningProcess, module: str, command: str) -> bool:
    return process.argv[2:4] == (module, command)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult:
    """How a command that should have ended by itself did."""

    status: int
    stderr: str
    seconds: float


def run_tandem(*args: str, env: Mapping[str, str], cwd: Path, timeout_s: float = START_TIMEOUT_S) -> CommandResult:
    """Run one `tandem` command to its end in exactly this environment; SIGINT after `timeout_s`."""
    began = time.monotonic()
    process = subprocess.Popen(
        tandem_command(*args),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(env),
        cwd=cwd,
        text=True,
    )
    try:
        _, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=STOP_TIMEOUT_S)
        raise AssertionError(f"tandem {' '.join(args)} did not end within {timeout_s:g} s:\n{stderr}") from None
    return CommandResult(status=process.returncode, stderr=stderr, seconds=time.monotonic() - began)


def python_path(*folders: Path) -> str:
    """PYTHONPATH that puts `folders` first and keeps what is there."""
    inherited: Sequence[str] = [p for p in (os.environ.get("PYTHONPATH"),) if p]
    return os.pathsep.join([*map(str, folders), *inherited])
