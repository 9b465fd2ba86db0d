"""`tandem ctl HOST:PORT rates`: has a worker measured, with a progress bar, and keeps the figures."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem_services.common.errors import StartupError

if TYPE_CHECKING:
    import httpx

SILENCE_S = 300.0
"""Longer than a whole measurement."""


def measure_rates(client: "httpx.Client", *, out: Path | None, force: bool) -> int:
    """The exit status: 1 when the worker cannot be measured now. Raises `StartupError` and what httpx raises."""
    if out is not None and not out.parent.is_dir():
        raise StartupError(f"--out {out}: the folder {out.parent} does not exist")
    with client.stream("POST", "/rates", json={"force": force}, timeout=SILENCE_S) as response:
        if not response.is_success:
            answer = json.loads(response.read())
            hint = "; --force measures all the same" if answer.get("code") == "busy" and not force else ""
            print(f"{answer['message']}{hint}", file=sys.stderr)
            return 1
        last = _followed(json.loads(line) for line in response.iter_lines() if line)
    if "rates" not in last:
        print(last.get("error", "the worker ended the measurement without figures"), file=sys.stderr)
        return 1
    text = json.dumps(last["rates"], indent=1) + "\n"
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")
    return 0


def _followed(items: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The last item, after all that report progress."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    last: dict[str, Any] = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring")
        for last in items:
            if "what" in last:
                progress.update(task, description=last["what"], completed=last["done"], total=last["total"])
            elif "rates" in last:
                progress.update(task, completed=progress.tasks[0].total)
    return last
