"""How peers are installed: commands with a log, shown while they run, and a stamp for what is done."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from peers.home import venv_python
from peers.processes import tail

CONSOLE = Console(stderr=True, highlight=False, soft_wrap=True)


class NotInstalledError(RuntimeError):
    """A peer cannot be installed here; the message says why in one line."""


def command(argv: Sequence[str | Path], *, title: str, log: Path, folder: Path | None = None) -> None:
    """Run it at the lowest priority. Raises `NotInstalledError` with the end of its log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with CONSOLE.status(title), log.open("wb") as out:
        status = subprocess.run(
            ["nice", "-n", "19", *map(str, argv)],
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            check=False,
        ).returncode
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
