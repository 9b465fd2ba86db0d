"""Places in which `tandem up` has to start and answer, or to name the limit that keeps it from starting.

Each is a command that starts another one in it, and perhaps a control group. Those that mount something do so in a
mount namespace of their own, for which the user has to be root.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from tandem_engine.base.linux import allowed_cpus
from tandem_testing.control_groups import ONE_WORKER, can_limit, new_group
from tandem_testing.system import System

MODEL = "tandem-mini"
TWO_WORKERS = ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "4")
UID = "54321"
"""Without an entry in /etc/passwd."""
ANSWER_S = 240.0
RUN_DIR = "RUN_DIR"
"""Variable of the scripts below: the run directory, which exists."""
Figures = dict[str, Any]


def mounted(script: str) -> tuple[str, ...]:
    """Command that mounts for itself alone, and then runs its arguments."""
    return ("unshare", "--mount", "sh", "-euc", f'{script}\nexec "$@"', "sh")


READ_ONLY = f"""\
for folder in /tmp /var/tmp; do
    mount --bind "$folder" "$folder"
    mount -o remount,bind,ro "$folder"
done
mount --bind "${RUN_DIR}" "${RUN_DIR}"
mount -o remount,bind,rw "${RUN_DIR}"
mount -o remount,bind,ro /
cd /
"""
"""Nothing of the root filesystem can be written, nor of other ones for temporary files, the run directory excepted."""
OWN_TEMPORARY = f'mkdir "${RUN_DIR}/tmp"\nexport TMPDIR="${RUN_DIR}/tmp"\n'
NO_SHARED_MEMORY = mounted("mount -t tmpfs -o ro none /dev/shm")
AS_OTHER_USER = (
    *("setpriv", "--reuid", UID, "--regid", UID, "--clear-groups"),
    # It reads the interpreter and the packages, wherever they are.
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"),
)
OTHER_USER = ("sh", "-euc", f'chown {UID} "${RUN_DIR}"\nexec "$@"', "sh", *AS_OTHER_USER)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One case."""

    name: str
    prefix: tuple[str, ...] = ()
    controller: str = ""
    """Of a control group; "" for none."""
    most: float = 0.0
    """Of that group: CPUs, or threads and processes."""
    flags: tuple[str, ...] = ONE_WORKER
    refused: str = ""
    """A pattern of the error with which the start ends; "" where it has to serve."""

    def not_checked(self) -> str:
        """Why it cannot be made here; "" where it can."""
        if self.controller and not can_limit(self.controller):
            return f"no control group of {self.controller} can be made here"
        if "unshare" in self.prefix and not _succeeds((*mounted("mount -t tmpfs none /dev/shm"), "true")):
            return "nothing can be mounted here"
        if "setpriv" in self.prefix and not _succeeds((*AS_OTHER_USER, "true")):
            return "the user cannot be changed here, or no other user may read the packages"
        return ""


PLACES = (
    Place(name="quota of 0.4 CPUs", controller="cpu", most=0.4),
    Place(name="cpuset of one CPU", controller="cpuset", most=1),
    Place(name="few threads and processes", controller="pids", most=80 + 10 * len(allowed_cpus())),
    Place(
        name="30 threads and processes", controller="pids", most=30, refused=r"of (at most )?30 threads and processes"
    ),
    Place(name="memory.high of 0.7 GiB", controller="memory.high", most=0.7 * (1 << 30)),
    Place(name="256 open files, more on request", prefix=("prlimit", "--nofile=256:4096")),
    Place(name="read-only root filesystem, TMPDIR elsewhere", prefix=mounted(READ_ONLY + OWN_TEMPORARY)),
    Place(name="read-only root filesystem", prefix=mounted(READ_ONLY), refused=r"TMPDIR"),
    Place(name="64 MiB of /dev/shm", prefix=mounted("mount -t tmpfs -o size=64m none /dev/shm"), flags=TWO_WORKERS),
    Place(name="no /dev/shm", prefix=NO_SHARED_MEMORY, flags=TWO_WORKERS, refused=r"/dev/shm cannot be written"),
    Place(
        name="no /dev/shm, UCX without it",
        prefix=(*NO_SHARED_MEMORY, "env", "UCX_TLS=^posix"),
        flags=TWO_WORKERS,
    ),
    Place(name="no HOME", prefix=("env", "-u", "HOME", "-u", "USER", "-u", "LOGNAME")),
    Place(name="user without an entry", prefix=(*OTHER_USER, "env", "HOME=/")),
    Place(name="user without an entry or HOME", prefix=(*OTHER_USER, "env", "-u", "HOME")),
    Place(
        name="C locale, unknown time zone",
        prefix=("env", "LC_ALL=C", "LANG=C", "PYTHONCOERCECLOCALE=0", "PYTHONUTF8=0", "TZ=Nowhere/None"),
    ),
)


def check(place: Place) -> Figures:
    """Statuses of its answers and what its logs have to say, or how its start ended."""
    with started(place) as system:
        try:
            system.wait_until_up()
        except AssertionError:
            return {"ended": system.process.poll(), "said": end_of_output(system)}
        return {"statuses": answered(system.url), "tracebacks": tracebacks(system)}


def problem(place: Place, figures: Figures) -> str:
    """What of the promise of a place is not kept; "" if it is."""
    if place.refused:
        kept = figures.get("ended") in (2, 3) and re.search(place.refused, figures["said"]) is not None
        return "" if kept else f"no error that matches {place.refused!r}"
    if set(figures.get("statuses", [0])) != {200}:
        return "it does not serve"
    return "there is a traceback" if figures["tracebacks"] else ""


@contextmanager
def started(place: Place) -> Iterator[System]:
    with tempfile.TemporaryDirectory(prefix="tandem-place-") as folder:
        # Other users pass through it.
        Path(folder).chmod(0o755)
        run_dir = Path(folder) / "run"
        with new_group(place.controller) if place.controller else nullcontext() as group:
            prefix = place.prefix
            if group is not None:
                group.limit(place.most)
                prefix = (*group.starting(), *prefix)
            system = System.launch(run_dir, *place.flags, env={RUN_DIR: str(run_dir)}, prefix=prefix)
            try:
                yield system
            finally:
                system.close()


def answered(url: str) -> list[int]:
    """Of a few requests; the last text does not fit one step and is not ASCII."""
    prompts = ["Once upon a time", "the fox and the river " * 60, "Zürich 日本語 " * 200]
    with httpx.Client(base_url=url, timeout=ANSWER_S) as http:
        return [
            http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 16}).status_code
            for prompt in prompts
        ]


def tracebacks(system: System) -> list[str]:
    """Names of logs that have one."""
    logs = [system.run_dir / "up.out", *sorted(system.run_dir.glob("*.log"))]
    return [log.name for log in logs if "Traceback" in log.read_text("utf-8", "replace")]


def end_of_output(system: System) -> str:
    return (system.run_dir / "up.out").read_text("utf-8", "replace")[-2000:]


@cache
def _succeeds(command: tuple[str, ...]) -> bool:
    """False without its program, too."""
    try:
        return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0
    except FileNotFoundError:
        return False
