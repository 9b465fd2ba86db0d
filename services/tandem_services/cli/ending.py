"""Signals that end `tandem up`: the first lets running requests finish, the second ends everything now."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from tandem_services.cli.processes import Supervisor
from tandem_services.common.tasks import ending_signals


@dataclass(slots=True)
class Ending:
    """Of one `tandem up`. The first signal raises `KeyboardInterrupt` with its number."""

    _stopping: bool = False
    _hurried: bool = False

    def watch_signals(self) -> None:
        """Take signals from now on."""
        for number in ending_signals():
            signal.signal(number, self._take)

    def stop(self, supervisor: Supervisor, grace: float, *, notify: Callable[[], None]) -> None:
        """Stop the processes; running requests have `grace` seconds, or until a further SIGINT or SIGTERM arrives.

        `notify`: called first, when a signal no longer interrupts.
        """
        self._stopping = True
        notify()
        supervisor.stop(grace, hurried=lambda: self._hurried)

    def _take(self, number: int, _: FrameType | None) -> None:
        if not self._stopping:
            self._stopping = True
            raise KeyboardInterrupt(number)
        # A terminal that is closed sends SIGHUP twice.
        self._hurried |= number != signal.SIGHUP


def how_to_end() -> str:
    """For the user of this process, which may have been started to ignore Ctrl-C."""
    return "Ctrl-C" if signal.SIGINT in ending_signals() else f"kill {os.getpid()}"
