"""Shows a start of `tandem up`: a live table on a terminal, lines in a pipe, notices to systemd, a summary."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tandem_engine.base.addresses import Address, is_loopback, loopback_beside
from tandem_engine.base.clock import MonotonicClock
from tandem_services.cli.processes import Supervisor, how_to_end, session_cpu_seconds
from tandem_services.cli.start_watch import Row, StartWatch, View, Watched, readiness
from tandem_services.common.service_manager import ServiceManager

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

PERIOD_S = 10.0
"""Longest time without a line."""

BAR_WIDTH = 24

NOTICE_PERIOD_S = 5.0
"""Between two notices to the service manager while nothing changes its phase."""

NOTICE_EXTENSION_S = 60.0
"""How long the service manager waits for the next notice: longer than a loaded machine stops this process."""


@contextmanager
def start_view(stream: TextIO | None = None) -> Iterator[View]:
    """The view for `stream`; standard error without one."""
    stream = stream or sys.stderr
    # rich itself would write colors into pipes if environment variables request them.
    if not stream.isatty():
        yield Lines(stream)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(file=stream)
    if console.is_dumb_terminal:
        yield Lines(stream)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield LiveTable(live)


class Lines:
    """A line for each new phase, and what all that are not ready do whenever `PERIOD_S` passed without one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown: dict[str, str] = {}
        self._last_line: float | None = None

    def show(self, rows: Sequence[Row], now: float) -> None:
        lines = [_change(row) for row in rows if self._shown.get(row.label) != row.phase]
        self._shown = {row.label: row.phase for row in rows}
        if self._last_line is None:
            self._last_line = now
        if not lines and now - self._last_line >= PERIOD_S:
            lines = [f"{row.label}: {row.doing} for {row.in_phase_s:.0f} s" for row in rows if not row.ready]
        if lines:
            self._last_line = now
            print("\n".join(lines), file=self._stream, flush=True)


def _change(row: Row) -> str:
    if row.ready:
        return f"ready {row.label} after {row.since_start_s:.1f} s"
    return f"{row.label}: {row.doing}, {row.since_start_s:.1f} s after the start"


class LiveTable:
    """A row for each process, which stays on the terminal when all are ready."""

    def __init__(self, live: "Live") -> None:
        self._live = live

    def show(self, rows: Sequence[Row], now: float) -> None:
        del now
        self._live.update(_table(rows), refresh=True)


def _table(rows: Sequence[Row]) -> "Table":
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for row in rows:
        bar = Text() if row.share is None or row.ready else ProgressBar(total=1, completed=row.share, width=BAR_WIDTH)
        style = "green" if row.ready else ""
        table.add_row(row.label, Text(row.doing, style=style), f"{row.since_start_s:.1f} s", bar)
    return table


class Notices:
    """Reports to the service manager, so that its own limit does not end a start that `StartWatch` lets continue."""

    def __init__(self, manager: ServiceManager) -> None:
        self._manager = manager
        self._phases: list[str] = []
        self._last: float | None = None

    def show(self, rows: Sequence[Row], now: float) -> None:
        phases = [row.phase for row in rows]
        if phases == self._phases and self._last is not None and now - self._last < NOTICE_PERIOD_S:
            return
        self._phases, self._last = phases, now
        doing = "; ".join(f"{row.label}: {row.doing}" for row in rows if not row.ready)
        self._manager.starting(
            f"starting: {doing}" if doing else "all processes are ready", extend_s=NOTICE_EXTENSION_S
        )


class Views:
    """Several at once."""

    def __init__(self, *views: View) -> None:
        self._views = views

    def show(self, rows: Sequence[Row], now: float) -> None:
        for view in self._views:
            view.show(rows, now)


def watch_start(
    watched: Sequence[Watched],
    supervisor: Supervisor,
    manager: ServiceManager,
    args: argparse.Namespace,
    restarting: Callable[[str], object],
) -> None:
    """Show what each process does until all are ready. `restarting`: called with a line for each that starts again.

    Raises `StartupError`, `ConfigError`.
    """
    with start_view() as view:
        StartWatch(
            watched=watched,
            supervisor=supervisor,
            view=Views(view, Notices(manager)),
            clock=MonotonicClock(),
            sleep=time.sleep,
            probe=readiness,
            cpu_seconds=session_cpu_seconds,
            restarting=restarting,
            stall_s=args.stall_timeout,
            limit_s=args.ready_timeout,
        ).run()


def greeting(args: argparse.Namespace, *, url: str, model: str, workers: Mapping[str, int], run_dir: Path) -> str:
    """`url`: of the API, as this machine reaches it; `workers`: health port by name."""
    keyed = args.api_keys is not None
    header = " -H 'Authorization: Bearer KEY'" if keyed else ""
    chat = f"{'TANDEM_API_KEY=KEY ' if keyed else ''}tandem chat{'' if url.endswith(':8000') else f' --url {url}'}"
    name, port = next(iter(workers.items()))
    address = Address(loopback_beside(args.host), port)
    return f"""
Tandem serves {model} at {url}

  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{header} -d '{{"model": "{model}", \
"stream": true, "messages": [{{"role": "user", "content": "Tell me a story about a fox who lives near a river."}}]}}'

  {chat}          chat in the terminal
  {url}/metrics   numbers; GET /v1/requests/ID/explain shows where a request ran
{_console_line(args, url)}  tandem ctl {address} links   commands to {name}{_others(workers)}
  {run_dir}   logs

{how_to_end()} stops everything.
"""


def _console_line(args: argparse.Namespace, url: str) -> str:
    guarded = args.api_keys is not None or is_loopback(args.host)
    served = guarded if args.console is None else args.console
    return f"  {url}/console   the fleet, requests' timelines and a playground, in a browser\n" if served else ""


def _others(workers: Mapping[str, int]) -> str:
    rest = [f"{name} {port}" for name, port in list(workers.items())[1:]]
    return f"; others: {', '.join(rest)}" if rest else ""
