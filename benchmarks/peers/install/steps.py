"""How peers are installed: commands with a log, shown while they run, and a stamp for what is done."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from peers.home import venv_python
from peers.processes import start, stop, tail

CONSOLE = Console(stderr=True, highlight=False, soft_wrap=True)

LIMIT_S = 900.0
"""Of one step: the longest builds llama.cpp."""


class NotInstalledError(RuntimeError):
    """A peer cannot be installed here; the message says why in one line."""


def command(argv: Sequence[str | Path], *, title: str, log: Path, folder: Path | None = None) -> None:
    """Run it at the lowest priority. Raises `NotInstalledError` with the end of its log."""
    began = time.monotonic()
    process = start(["nice", "-n", "19", *map(str, argv)], log=log, folder=folder)
    try:
        with CONSOLE.status(title):
            status = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        raise NotInstalledError(f"{title} took longer than {LIMIT_S:.0f} s (log: {log})") from None
    finally:
        stop(process)
    if status:
        raise NotInstalledError(f"{title} failed (log: {log}):\n{tail(log, 4)}")
    CONSOLE.print(f"  {title}: {time.monotonic() - began:.0f} s")


def venv(home: Path, peer: str) -> Path:
    """Its Python; made where it is missing."""
    python = venv_python(home, peer)
    if not python.exists():
        command(
            [sys.executable, "-m", "venv", python.parents[1]],
            title=f"environment of {peer}",
            log=home / "logs/venv.log",
        )
    return python


def pip(python: Path, *arguments: str | Path, title: str, log: Path) -> None:
    command([python, "-m", "pip", "--disable-pip-version-check", "install", *arguments], title=title, log=log)


def is_done(folder: Path, want: str) -> bool:
    stamp = folder / ".tandem-peers"
    return stamp.is_file() and stamp.read_text() == want


def mark_done(folder: Path, want: str) -> None:
    (folder / ".tandem-peers").write_text(want)
