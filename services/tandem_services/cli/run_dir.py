"""The folder in which `tandem up` keeps its keys and logs.

`run.json` lists the files that `tandem up` made there. Any other file is never written, renamed or deleted: a name
that is needed and belongs to a file that is not listed is an error. Logs of earlier starts are kept as NAME.log.1
(the newest) to NAME.log.5; a log that is full becomes one, too.

While `tandem up` runs, `run.json` also has its process, version, model, URL and the processes that it started. If these
are still there at the next start, `tandem up` was killed: the kernel kills all processes of a container at its memory
limit where `memory.oom.group` is set, and no process remains to report it.
"""

import os
import stat
import threading
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import Literal

import msgspec

from tandem_engine.base.cgroups import machine_memory_kills, memory_shortage
from tandem_services.cli.processes import Identity
from tandem_services.common.errors import StartupError
from tandem_services.common.private_folder import new_contents

RUN_FILE = "run.json"
KEPT_LOGS = 5
_MAX_RUN_FILE_BYTES = 1 << 20

_WRITING = threading.Lock()
"""Of `run.json`."""


def prepare_run_dir(path: Path, *, files: Iterable[str], logs: Iterable[str]) -> Path:
    """Makes the folder ready for a start that will write `files` and `logs`. Returns its absolute path.

    Raises:
        StartupError: the folder cannot be written to, or a file there has a needed name and is not listed as ours.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        ours = _listed(path)
        _require_unused(path)
        logs = [*logs]
        needed = {RUN_FILE, *files, *logs}
        _require_ours(path, sorted(needed), ours)
        kept = {name for log in logs for name in _rotate(path, log, ours)}
        _write(path, ours | needed | kept, None)
    except OSError as error:
        raise StartupError(
            f"cannot write to {path} ({error.strerror}): choose another folder with --run-dir"
        ) from error
    return path.resolve()


class StartedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One that `tandem up` started."""

    name: str
    pid: int
    role: str = ""
    health_port: int | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One `tandem up` that runs, or was killed."""

    up: Identity
    version: str
    model: str
    model_path: str
    model_root: str = ""
    """Repository and commit of a model from a hub."""
    port: int
    url: str
    processes: tuple[StartedProcess, ...]
    grace_s: float = 5.0
    """Time that running requests have when it is stopped."""
    memory_kills: int | None = None
    """`cgroups.machine_memory_kills` when this was written."""
    pid_namespace: str = ""
    """In which `up` has its number; "" of an earlier release, and where there is no /proc."""


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`."""

    made_by: Literal["tandem up"] = "tandem up"
    files: tuple[str, ...]
    run: Run | None = None


def record_run(path: Path, run: Run | None) -> None:
    """`run` uses the folder; None: nothing does. Raises `OSError`."""
    with _WRITING:
        _write(path, _listed(path), run)


def rotate_log(log: Path) -> None:
    """Rename a log as at the next start, so that a new one can begin. Called by any thread. Raises `OSError`."""
    with _WRITING:
        document = _read(log.parent)
        if document is None:
            return
        ours = frozenset(document.files)
        _write(log.parent, ours | {*_rotate(log.parent, log.name, ours)}, document.run)


def read_run(path: Path) -> Run | None:
    """The `tandem up` that uses the folder now; None where there is none, or where it was killed."""
    document = _read(path)
    if document is None or document.run is None or not document.run.up.is_running:
        return None
    return document.run


def describe_killed_run(path: Path) -> str | None:
    """How the last `tandem up` in this folder was killed, as far as the kernel's counters show; None if it stopped, or
    runs. Its control group may be gone, as after a restart of its container: the machine's counter remains."""
    try:
        document = _read(path)
    except OSError:  # `prepare_run_dir` says why
        return None
    if document is None or document.run is None or document.run.up.is_running:
        return None
    run, here = document.run, Identity.of(os.getpid())
    what = f"the last tandem up in this folder (process {run.up.pid}) was killed"
    if here is None or here.boot != run.up.boot:
        return f"{what}, its machine restarted, or it runs on another machine"
    if run.pid_namespace not in ("", pid_namespace()):
        what += ", or runs in another container that shares it"
    return f"{what}; {_describe_kills(run.memory_kills, machine_memory_kills())}"


def _describe_kills(before: int | None, now: int | None) -> str:
    """Whether the kernel has killed for memory, by the machine's counter then and now: a clause of a sentence."""
    if before is None or now is None:
        return "this kernel does not count kills for memory"
    if now < before:
        return "the kernel's count of kills for memory went back, as in a restored machine"
    if now == before:
        return "not by the kernel for memory"
    return (
        f"perhaps by the kernel because {memory_shortage()}: {now - before} processes of this machine, of any "
        "container, were killed for memory since. If so, provide more memory, or lower --kv-cache-gib or "
        "--max-running-requests"
    )


def pid_namespace() -> str:
    """Of this process; "" where there is no /proc."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def listed_logs(path: Path) -> list[Path]:
    """Newest log of each process, of those that `run.json` lists: files of others are no logs of ours."""
    names = sorted(name for name in _listed(path) if name.endswith(".log"))
    return [path / name for name in names if _exists(path / name) and stat.S_ISREG((path / name).lstat().st_mode)]


def _require_unused(path: Path) -> None:
    run = read_run(path)
    if run is not None:
        raise StartupError(
            f"{path} is in use by the tandem up with process id {run.up.pid}, which serves {run.url}: stop it with "
            f"`tandem stop --run-dir {path}`, or choose another folder with --run-dir"
        )


def _read(path: Path) -> _Document | None:
    """None if there is no `run.json` of ours."""
    run_file = path / RUN_FILE
    try:
        if not stat.S_ISREG(run_file.lstat().st_mode):
            return None
        with run_file.open("rb") as opened:
            return msgspec.json.decode(opened.read(_MAX_RUN_FILE_BYTES), type=_Document)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError, RecursionError):
        return None


def _listed(path: Path) -> frozenset[str]:
    """Names that `run.json` lists, itself included; empty if there is none of ours."""
    document = _read(path)
    return frozenset() if document is None else frozenset(document.files)


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


def _write(path: Path, names: Iterable[str], run: Run | None) -> None:
    text = msgspec.json.format(msgspec.json.encode(_Document(files=tuple(sorted(names)), run=run)), indent=1)
    with new_contents(path / RUN_FILE) as file:
        file.write(text + b"\n")


def _exists(path: Path) -> bool:
    """Of the name itself: a link that leads nowhere exists."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True
