"""A name service of one fleet: its processes see a hosts file of their own, which a scenario rewrites.

    processes   start in a mount namespace in which two files of the fleet's folder lie over /etc/hosts and
                /etc/resolv.conf; nothing else on the machine sees them
    scenario    `point` gives a name an address, `forget` makes it unknown: no server answers, so lookups fail at once

Needs the right to make a mount namespace, which root has, and most users by a user namespace.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

OVERLAY = 'mount --bind "$0/hosts" /etc/hosts && mount --bind "$0/resolv.conf" /etc/resolv.conf && exec "$@"'


@dataclass(frozen=True, slots=True)
class NameService:
    """Files in `folder`. Raises `OSError` when they cannot be written."""

    folder: Path

    def start(self) -> None:
        """No name is known yet but localhost."""
        (self.folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n", "ascii")
        self.forget()

    def point(self, name: str, address: str) -> None:
        self._write(f"127.0.0.1 localhost\n{address} {name}\n")

    def forget(self) -> None:
        self._write("127.0.0.1 localhost\n")

    def around(self, argv: Sequence[str]) -> list[str]:
        """`argv`, run where names mean what this service says. The process keeps its pid."""
        return [*_unshare(), "sh", "-c", OVERLAY, str(self.folder), *argv]

    def _write(self, text: str) -> None:
        # In place: a bind mount shows the file that was there, not what takes its name.
        with (self.folder / "hosts").open("r+" if (self.folder / "hosts").exists() else "w", encoding="ascii") as file:
            file.write(text)
            file.truncate()


def why_not() -> str:
    """Why this machine cannot give a fleet its own names; "" when it can."""
    if shutil.which("unshare") is None:
        return "unshare (util-linux) is not installed"
    tried = subprocess.run([*_unshare(), "sh", "-c", "mount --bind / /"], capture_output=True, text=True, check=False)
    return f"no mount namespace here: {tried.stderr.strip()[:200]}" if tried.returncode else ""


def _unshare() -> list[str]:
    return ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
