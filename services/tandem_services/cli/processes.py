"""The processes that `tandem up` starts, watches, restarts and stops.

Life of a process
    start      argv without a shell, output to a log file, killed by the kernel when the parent dies
    exit while starting up   the whole start-up fails, with the reason it gave or the last lines of its log
    exit while serving       restarted after a pause that doubles from 1 s to 30 s
    stop       SIGTERM in reverse order of start: finish what runs. SIGINT after the grace period: end now.
               SIGKILL for what is left then. What the others use to say good-bye (Redis) is stopped after them

A redis-server of our own for one machine: a socket that only this user can open, and nothing written to disk.

It has no port, so no other user of the machine and no page in a browser reaches it, and no password that could be seen.

The folder in which `tandem up` keeps its keys and logs.

`run.json` lists the files that `tandem up` made there. Any other file is never written, renamed or deleted: a name
that is needed and belongs to a file that is not listed is an error. Logs of earlier starts are kept as NAME.log.1
(the newest) to NAME.log.5.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING
from urllib.parse import quote

from tandem_engine.base.errors import ConfigError
from tandem_engine.base.linux import die_with_parent
from tandem_services.common.errors import StartupError
from tandem_services.common.private_folder import private_folder

if TYPE_CHECKING:
    from tandem_services.common.redis_client import RedisAddress


FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0

STABLE_AFTER = 60.0
"""A process that ran this long starts again with the first pause."""

HURRY_SECONDS = 5.0
"""From SIGINT to SIGKILL: time to abort requests and to close sockets."""

POLL_SECONDS = 0.02

USAGE = 2
"""Exit status of a process whose flags cannot work."""

_REASON = re.compile(r"(?:\bERROR +\S+|^tandem(?:-engine)?: error:) (.+)$", re.MULTILINE)
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
    outlives_others: bool = False
    """Stopped once the others are gone."""

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509  only prctl runs between fork and exec
            )
        self.started_at = time.monotonic()
        self.restart_at = None

    @property
    def status(self) -> int | None:
        """Exit status, None while running."""
        return None if self.process is None else self.process.poll()

    def last_words(self, lines: int = 5) -> str:
        """The first error it logged on purpose; without one, or after a crash, the end of its log."""
        text = self.log.read_text("utf-8", "replace").strip()
        reason = _REASON.search(text)
        if reason is not None and "Traceback" not in text:
            return f": {reason[1]} (log: {self.log})"
        tail = "\n".join(f"  {line}" for line in text.splitlines()[-lines:])
        return f"; the end of {self.log}:\n{tail}"


@dataclass(kw_only=True, slots=True)
class Supervisor:
    """All children, in the order they were started."""

    children: list[Child] = field(default_factory=list)

    def start(self, child: Child) -> None:
        child.start()
        self.children.append(child)

    def require_alive(self) -> None:
        """Raise `StartupError` naming the first process that has exited; `ConfigError` where a flag was at fault."""
        for child in self.children:
            if child.status is not None:
                problem = StartupError if child.status != USAGE else ConfigError
                raise problem(f"{child.name} {_describe(child.status)} while starting{child.last_words()}")

    def restart_dead(self) -> list[str]:
        """Start again what died and has waited its pause. Returns a line for each event."""
        events = []
        now = time.monotonic()
        for child in self.children:
            status = child.status
            if status is None:
                continue
            if child.restart_at is None:
                if now - child.started_at > STABLE_AFTER:
                    child.pause = FIRST_PAUSE
                child.restart_at = now + child.pause
                events.append(f"{child.name} {_describe(status)}; restarting in {child.pause:g} s (log: {child.log})")
                child.pause = min(child.pause * 2, LONGEST_PAUSE)
            elif now >= child.restart_at:
                child.start()
                events.append(f"{child.name} restarted")
        return events

    def stop(self, grace: float) -> None:
        """End every child; returns when all are gone. Running requests have `grace` seconds to finish."""
        _stop([child for child in self.children if not child.outlives_others], grace)
        _stop([child for child in self.children if child.outlives_others], grace)


def _stop(children: Sequence[Child], grace: float) -> None:
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGINT, HURRY_SECONDS), (signal.SIGKILL, None)):
        for child in reversed(children):
            if child.process is not None and child.status is None:
                child.process.send_signal(number)
        if _gone_within(children, patience):
            return


def _gone_within(children: Sequence[Child], patience: float | None) -> bool:
    """Whether every child has exited before `patience` is over; None waits as long as it takes."""
    deadline = None if patience is None else time.monotonic() + patience
    while any(child.process is not None and child.status is None for child in children):
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _describe(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


START_TIMEOUT = 10.0
SOCKET_FILE, CONFIG_FILE = "redis.sock", "redis.conf"

MAX_SOCKET_BYTES = 100
"""Of a path; Linux takes 107."""

CONFIG = """\
port 0
unixsocket {socket}
unixsocketperm 600
dir {folder}
daemonize no
save ""
appendonly no
maxmemory 256mb
maxmemory-policy volatile-ttl
"""


def start_redis(supervisor: Supervisor, run_dir: Path) -> str:
    """Start redis-server and return its URL. Raises `StartupError` when it is not installed or does not answer."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise StartupError(
            "redis-server is not installed: run 'apt-get install redis-server', or name a running one with --redis-url"
        )
    from tandem_services.common.redis_client import write_private

    door = _socket_path(run_dir)
    config = run_dir / CONFIG_FILE
    write_private(config, CONFIG.format(socket=_quoted(door), folder=_quoted(run_dir)))
    supervisor.start(Child(name="redis", argv=[binary, str(config)], log=run_dir / "redis.log", outlives_others=True))
    _wait_for_socket(supervisor, door)
    return f"unix://{quote(str(door))}"


def _socket_path(run_dir: Path) -> Path:
    """In the run directory. In another folder of this user where that path is too long for the kernel or somebody
    else's file has the name, which redis-server would remove.
    """
    path = run_dir / SOCKET_FILE
    if len(os.fsencode(path)) <= MAX_SOCKET_BYTES and (path.is_socket() or not os.path.lexists(path)):
        return path
    try:
        return private_folder("redis") / f"{token_hex(8)}.sock"
    except OSError as error:
        raise StartupError(f"no folder for the socket of Redis: {error}; choose a shorter --run-dir") from error


def _quoted(path: Path) -> str:
    """As the configuration of Redis takes it."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def require_redis(address: "RedisAddress") -> None:
    """Raise `StartupError` when the Redis that the user named does not answer, `ConfigError` when it is no URL."""
    from tandem_services.common.redis_client import BACKGROUND_TIMEOUT_S, RedisClient, RedisUnavailableError

    async def ask() -> None:
        redis = RedisClient(address, timeout_s=BACKGROUND_TIMEOUT_S)
        try:
            await redis.require(wait_s=0.0)
        finally:
            await redis.close()

    try:
        asyncio.run(ask())
    except RedisUnavailableError as error:
        raise StartupError(str(error)) from error


def _wait_for_socket(supervisor: Supervisor, path: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        supervisor.require_alive()
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                return
        time.sleep(0.02)
    raise StartupError(f"redis-server did not listen on {path} within {START_TIMEOUT:g} s")


def python_command(*args: str) -> list[str]:
    """A `tandem` subcommand as a process of this interpreter."""
    return [sys.executable, "-m", "tandem_services.cli.main", *args]


RUN_FILE = "run.json"
KEPT_LOGS = 5
_MAX_RUN_FILE_BYTES = 1 << 20


def prepare_run_dir(path: Path, *, files: Iterable[str], logs: Iterable[str]) -> Path:
    """Makes the folder ready for a start that will write `files` and `logs`. Returns its absolute path.

    Raises:
        StartupError: the folder cannot be written to, or a file there has a needed name and is not listed as ours.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        ours = _listed(path)
        logs = [*logs]
        needed = {RUN_FILE, *files, *logs}
        _require_ours(path, sorted(needed), ours)
        kept = {name for log in logs for name in _rotate(path, log, ours)}
        _write_list(path, ours | needed | kept)
    except OSError as error:
        raise StartupError(
            f"cannot write to {path} ({error.strerror}): choose another folder with --run-dir"
        ) from error
    return path.resolve()


def _listed(path: Path) -> frozenset[str]:
    """Names that `run.json` lists, itself included; empty if there is none of ours."""
    run_file = path / RUN_FILE
    try:
        if not stat.S_ISREG(run_file.lstat().st_mode):
            return frozenset()
        with run_file.open("rb") as opened:
            document = json.loads(opened.read(_MAX_RUN_FILE_BYTES))
    except (FileNotFoundError, ValueError, RecursionError):
        return frozenset()
    if not isinstance(document, dict) or document.get("made_by") != "tandem up":
        return frozenset()
    names = document.get("files")
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()


def _require_ours(path: Path, names: Iterable[str], ours: frozenset[str]) -> None:
    for name in names:
        if not _exists(path / name):
            continue
        if name not in ours or not stat.S_ISREG((path / name).lstat().st_mode):
            raise StartupError(
                f"{path / name} exists and was not made by tandem up: choose another folder with --run-dir"
            )


def _rotate(path: Path, log: str, ours: frozenset[str]) -> list[str]:
    """Moves NAME.log to NAME.log.1 and so on; the oldest is deleted. Returns the names of the logs that remain.

    Numbers from that of the first foreign file on are left alone.
    """
    names = [log, *(f"{log}.{number}" for number in range(1, KEPT_LOGS + 1))]
    usable = [*takewhile(lambda name: name in ours or not _exists(path / name), names)]
    last = next((number for number, name in enumerate(usable) if not _exists(path / name)), len(usable) - 1)
    (path / usable[last]).unlink(missing_ok=True)
    for number in range(last, 0, -1):
        (path / usable[number - 1]).replace(path / usable[number])
    return [name for name in usable if _exists(path / name)]


def _write_list(path: Path, names: Iterable[str]) -> None:
    temporary = path / f".{RUN_FILE}.new"
    temporary.unlink(missing_ok=True)
    temporary.touch(mode=0o600, exist_ok=False)
    temporary.write_text(json.dumps({"made_by": "tandem up", "files": sorted(names)}, indent=1) + "\n")
    temporary.replace(path / RUN_FILE)


def _exists(path: Path) -> bool:
    """Of the name itself: a link that leads nowhere exists."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True
