"""Signals that this process ignores, as a background job of a shell or under nohup, are not ignored by its children.

A child inherits SIG_IGN, but never a handler: exec gives it the default. So a handler that does nothing keeps this
process as it was, and lets tests end the processes they start by signals.
"""

import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def give_children_default_signals() -> None:
    """Call it in the main thread, before the first child is started."""
    for number in SIGNALS:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _do_nothing)


def stop_ignoring_signals() -> None:
    """In a child, between fork and exec: for one whose starter may ignore them."""
    for number in SIGNALS:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """As SIG_IGN."""
