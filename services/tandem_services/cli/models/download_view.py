"""How a download is shown: a bar on a terminal, lines without control codes elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from tandem_engine.checkpoint_source.download import Report

PERIOD_S = 10.0
"""Between two lines in a pipe."""


@contextmanager
def download_view(what: str, stream: TextIO) -> "Iterator[Report]":
    """The view of a download of `what` for `stream`."""
    if not stream.isatty():
        yield Lines(what, stream)
        return
    from rich.console import Console

    console = Console(file=stream)
    if console.is_dumb_terminal:
        yield Lines(what, stream)
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Bar(what, Progress(*columns, TimeRemainingColumn(), console=console))
    try:
        yield bar
    finally:
        bar.close()


class Lines:
    """A line at the start, one whenever `PERIOD_S` has passed, and one at the end."""

    def __init__(self, what: str, stream: TextIO) -> None:
        self._what, self._stream = what, stream
        self._next_s = 0.0

    def say(self, line: str) -> None:
        print(f"tandem: {line}", file=self._stream, flush=True)

    def progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next_s and done < total:
            return
        self._next_s = now + PERIOD_S
        self.say(f"{self._what}: {megabytes(done)} of {megabytes(total)} MB downloaded")


class Bar:
    """A bar that stays on the terminal; none where nothing is downloaded."""

    def __init__(self, what: str, progress: "Progress") -> None:
        self._what, self._progress = what, progress
        self._task: TaskID | None = None

    def say(self, line: str) -> None:
        self._progress.console.print(f"tandem: {line}", markup=False, highlight=False, soft_wrap=True)

    def progress(self, done: int, total: int) -> None:
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task(self._what, total=total)
        self._progress.update(self._task, completed=done)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._task is not None:
            self._progress.stop()


def megabytes(size: int) -> str:
    """`size` in bytes, for people."""
    return f"{size / 1e6:,.1f}"
