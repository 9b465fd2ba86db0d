"""Processes of a run: started with a log, stopped whole, and none left behind.

A peer may put children into sessions of their own, and the measuring process may be killed. So every process inherits a
variable (`MARK`) that names the run by pid and birth; at the end of a run, and at the start of the next, each process
that carries one is ended by its pid. A process that changes its title loses the variable (vLLM does): a tree is
remembered by pid and birth while it can still be seen, and what uses a peer's environment and has lost its parent
belongs to one.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from peers.machine import descendants
from tandem_engine.base.linux import die_with_parent

MARK = "PEERS_RUN"
GRACE_S = 10.0


class PeerError(RuntimeError):
    """A peer did not start, did not answer, or answered something else than it was asked for."""


def own_mark() -> str:
    """Of the run that this process is."""
    return f"{os.getpid()}-{_born(os.getpid())}"


def _born(pid: int | str) -> str | None:
    """When a process was started, in ticks of the machine's clock; None when there is none of this number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19]
    except OSError:
        return None


def start(
    argv: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    pipes: bool = False,
) -> "subprocess.Popen[bytes]":
    """Start it; what it says goes to `log`, its standard output to a pipe with `pipes`.

    A Ctrl-C is ours alone: it has a group of its own. Not a session: Linux shares cores out between sessions first, so
    that the priority with which all of this was started would be lost.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        return subprocess.Popen(
            argv,
            stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipes else out,
            stderr=out,
            env={**os.environ, **(environment or {}), MARK: own_mark()},
            cwd=folder,
            process_group=0,
            preexec_fn=die_with_parent,  # noqa: PLW1509  only prctl runs between fork and exec
        )


def output_of(argv: Sequence[str], *, log: Path, limit_s: float, environment: Mapping[str, str] | None = None) -> bytes:
    """What a process writes to its standard output. Raises `PeerError` when it fails or takes longer."""
    process = start(argv, log=log, environment=environment, pipes=True)
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise PeerError(f"{log.stem} took longer than {limit_s:.0f} s") from None
    finally:
        stop(process)
    if process.returncode:
        raise PeerError(f"{log.stem} ended with status {process.returncode}:\n{tail(log)}")
    return output


def tail(log: Path, lines: int = 12) -> str:
    return "\n".join(f"  {line}" for line in log.read_text("utf-8", "replace").splitlines()[-lines:])


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End it and everything below it. Returns when all are gone."""
    tree = [(pid, _born(pid)) for pid in descendants(process.pid)] if process.poll() is None else []
    if tree:
        resume(process)
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
    for pid, born in tree[1:]:
        _kill(pid, born)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def pause(process: "subprocess.Popen[bytes]") -> None:
    """Stop the clock of a process tree: whatever it would do while others are measured, such as spinning, it cannot."""
    _signal_all(process, signal.SIGSTOP)


def resume(process: "subprocess.Popen[bytes]") -> None:
    _signal_all(process, signal.SIGCONT)


def _signal_all(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    for pid in descendants(process.pid):
        try:
            os.kill(pid, number)
        except ProcessLookupError:  # it has just ended
            continue


def end_marked(marks: Iterable[str] | None = None, *, home: Path | None = None) -> list[int]:
    """End every process that carries the mark of one of these runs, None for runs that are over; returns their pids.

    With `home`, also each process that has lost both its mark and its parent and uses an environment there.
    """
    ended = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        pid = int(folder.name)
        born, mark = _born(pid), _mark_of(pid)
        if mark is None:
            left = home is not None and _parent(pid) == 1 and _uses(pid, home / "venvs")
        else:
            left = mark in marks if marks is not None else not _is_running(mark)
        if left:
            ended += [each for each in descendants(pid) if each == pid or _mark_of(each) is None]
            for each in descendants(pid)[1:]:
                _kill(each, _born(each))
            _kill(pid, born)
    return ended


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1])
    except OSError:
        return None


def _uses(pid: int, folder: Path) -> bool:
    """Whether it has mapped a file from there."""
    try:
        return str(folder) in Path(f"/proc/{pid}/maps").read_text("utf-8", "replace")
    except OSError:
        return False


def _mark_of(pid: int) -> str | None:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return None
    prefix = f"{MARK}=".encode()
    return next((each.removeprefix(prefix).decode() for each in variables if each.startswith(prefix)), None)


def _is_running(mark: str) -> bool:
    """Whether the process that a mark names is there; its number may be another's by now."""
    pid, _, born = mark.partition("-")
    return _born(pid) == born


def _kill(pid: int, born: str | None) -> None:
    """SIGKILL, unless the number belongs to another process by now; returns when the process is gone."""
    deadline = time.monotonic() + GRACE_S
    while born is not None and _born(pid) == born and not _is_dead(pid) and time.monotonic() < deadline:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(0.02)


def _is_dead(pid: int) -> bool:
    """Whether only its status is left, for a parent that has not asked for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
