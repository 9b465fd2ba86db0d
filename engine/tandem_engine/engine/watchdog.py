"""Dumps the state of a hung engine, before it is killed.

    a step hangs           the scheduler waits for it and can still report: queues, pages, and all stacks
    the scheduler hangs    a timer of the kernel sends SIGALRM, whose handler in C writes all stacks, even while
                           something holds the GIL

The timer is one system call and no thread: it cannot fail on a machine that is out of threads, and costs nothing else.

Neither ends the process. A hung engine becomes silent (see `Loop`), so gateways use other workers, `/live` fails and
the supervisor restarts the worker; the dump remains for the analysis.
"""

import faulthandler
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from tandem_engine.base.errors import ConfigError
from tandem_engine.base.linux import PRIVATE_FOLDER, private_opener
from tandem_engine.base.recording import recording
from tandem_engine.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

MAX_S = 1e8
"""What a timer of the kernel can be set to; about three years."""

MAX_LISTED = 32
"""Requests of each queue that a dump names."""


class Watchdog:
    """One per process, which has a single timer; SIGALRM is the watchdog's as long as it is open."""

    def __init__(self, *, timeout: float, folder: Path | None, name: str, describe: Callable[[], str]) -> None:
        """`folder` receives `hang-NAME.txt`; None writes to standard error.

        Raises `ConfigError` when the file cannot be written, which must not be learned during a hang.
        """
        self._timeout = min(timeout, MAX_S)
        self._describe = describe
        self.path = None if folder is None else folder / f"hang-{name}.txt"
        self._file = sys.stderr if self.path is None else _open(self.path)
        self._open = True
        faulthandler.register(signal.SIGALRM, file=self._file, all_threads=True)

    def progressed(self) -> None:
        """The scheduler turns: restart the timer."""
        if self._open:
            signal.setitimer(signal.ITIMER_REAL, self._timeout)

    @recording
    def step_hangs(self, seconds: float) -> None:
        """The scheduler has waited so long for a step: write everything down."""
        logger.error("step not completed for %.0f s; writing state to %s", seconds, self.path or "standard error")
        print(f"step not completed for {seconds:.0f} s\n{self._describe()}\n", file=self._file, flush=True)
        faulthandler.dump_traceback(file=self._file, all_threads=True)

    def close(self) -> None:
        """Stop the timer. A file that nothing was written to goes. Idempotent."""
        if not self._open:
            return
        self._open = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        faulthandler.unregister(signal.SIGALRM)
        if self.path is None:
            return
        self._file.close()
        if self.path.stat().st_size == 0:
            self.path.unlink()


def _open(path: Path) -> TextIO:
    try:
        path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        return open(path, "w", opener=private_opener)  # Path.open has no opener
    except OSError as error:
        raise ConfigError(f"--crash-dump-folder {path.parent} cannot be written ({error.strerror})") from error


def describe_scheduler(scheduler: Scheduler) -> str:
    """Queues and pages in words. Changes nothing; for the scheduler thread."""
    queues, tally = scheduler.queues, scheduler.tally
    report = scheduler.audit()
    lines = [
        f"steps: {tally.launched} launched, {tally.settled} settled; loop turns: {tally.loops}",
        f"pages: {report.free} free, {report.tree} cached, {report.private} private, {report.held} held by transfers",
        *(f"problem: {problem}" for problem in report.problems),
    ]
    groups = {
        "running": queues.running,
        "chunked": [] if queues.chunked is None else [queues.chunked],
        "waiting": [*queues.waiting],
        "kept by stages": [req for stage in queues.stages for req in stage.live()],
    }
    for name, requests in groups.items():
        lines.append(f"{name}: {len(requests)}")
        lines += [
            f"  {req.rid}: {req.prompt_len} prompt and {len(req.output_ids)} output tokens, "
            f"{req.launched_len} launched, {req.steps_in_flight} steps in flight, pending finish {req.to_finish}"
            for req in requests[:MAX_LISTED]
        ]
    return "\n".join(lines)
