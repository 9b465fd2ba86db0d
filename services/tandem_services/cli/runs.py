"""`tandem ps` and `tandem stop`: all running `tandem up` of this user, found by their `run.json`."""

import argparse
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tandem_engine.base.addresses import Address, loopback_beside
from tandem_engine.base.errors import ConfigError
from tandem_services.cli.flags import port_number
from tandem_services.common.errors import StartupError
from tandem_services.common.settings import read_settings

if TYPE_CHECKING:
    from tandem_services.cli.run_dir import Run, StartedProcess


GATEWAY = "gateway"
"""Name of the process whose port is that of the API."""

STOP_S = 60.0
"""From the end of the grace that running requests have until all processes are gone."""


def state_folder() -> Path:
    """Folder of the run directories. Raises `ConfigError` where the user has no home folder."""
    home = read_settings().state_home
    if home is None:
        raise ConfigError("this user has no home folder: set --run-dir, or XDG_STATE_HOME to an absolute path")
    return home / "tandem"


def default_run_dir(port: int) -> Path:
    """Of a `tandem up` on `port` without --run-dir."""
    return state_folder() / str(port)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    ps = commands.add_parser(
        "ps",
        help="list what `tandem serve` and `tandem up` run on this machine",
        description="List every `tandem serve` and `tandem up` of this user, with its URL, model and processes, and "
        "what processes that are not ready do. Those that were started with --run-dir need it here, too.",
    )
    _add_run_dir(ps)
    ps.set_defaults(run=run_ps)
    stop = commands.add_parser(
        "stop",
        help="stop what `tandem serve` or `tandem up` runs",
        description="Stop a `tandem serve` or `tandem up` of this user like Ctrl-C in its terminal: running requests "
        "have its --grace to finish. Exit status 1 if nothing runs there.",
    )
    stop.add_argument("port", nargs="?", type=port_number, metavar="PORT", help="of its API; needed if several run")
    _add_run_dir(stop)
    stop.set_defaults(run=run_stop)


def _add_run_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="the folder that `tandem up` was started with")


def run_ps(args: argparse.Namespace) -> int:
    for run, folder in _running(args.run_dir):
        print(f"{run.url}  {run.model}  tandem {run.version}  pid {run.up.pid}  {folder}")
        for process in run.processes:
            port = f"  health port {process.health_port}" if process.health_port else ""
            print(f"  {process.name:<12} pid {process.pid}{port}{_state(run, process)}")
    return 0


def _state(run: "Run", process: "StartedProcess") -> str:
    """Whether it is ready, and what is missing; empty for one without a port."""
    from tandem_services.cli.start_watch import readiness

    if process.health_port:
        inner = loopback_beside(urlsplit(run.url).hostname or "")
        url = Address(inner, process.health_port).url("/ready")
    elif process.name == GATEWAY:
        url = f"{run.url}/ready"
    else:
        return ""
    answer = readiness(url)
    return "  ready" if answer.ready else f"  {'; '.join(answer.reasons) or 'does not answer'}"


def run_stop(args: argparse.Namespace) -> int:
    runs = [run for run, _ in _running(args.run_dir) if args.port in (None, run.port)]
    if not runs:
        print("nothing runs here" if args.port is None else f"nothing runs on port {args.port}")
        return 1
    if len(runs) > 1:
        ports = ", ".join(str(run.port) for run in runs)
        raise ConfigError(f"several run, on ports {ports}: name one, as in `tandem stop {runs[0].port}`")
    _stop(runs[0])
    print(f"stopped {runs[0].url} (pid {runs[0].up.pid})")
    return 0


def _running(run_dir: Path | None) -> "Iterator[tuple[Run, Path]]":
    """In the given folder, or in all that are used by default."""
    from tandem_services.cli.run_dir import read_run

    folders = [run_dir] if run_dir is not None else sorted(state_folder().glob("*/"))
    for folder in folders:
        run = read_run(folder)
        if run is not None:
            yield run, folder


def _stop(run: "Run") -> None:
    """Return when it is gone. The descriptor keeps its meaning when the number is given to another process."""
    try:
        descriptor = os.pidfd_open(run.up.pid)
    except ProcessLookupError:
        return  # It has ended since.
    try:
        if not run.up.is_running:
            return
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        limit_s = run.grace_s + STOP_S
        if not ended.poll(limit_s * 1000):
            raise StartupError(f"the tandem up with process id {run.up.pid} still runs {limit_s:g} s after SIGTERM")
    except PermissionError as error:
        raise StartupError(f"process {run.up.pid} belongs to another user") from error
    finally:
        os.close(descriptor)
