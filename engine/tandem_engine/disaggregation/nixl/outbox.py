"""Events on their way from the transfer thread to the scheduler thread."""

import contextlib
import os
from collections import deque

from tandem_engine.disaggregation.transport import TransportEvent


class Outbox:
    """A queue with a descriptor that is readable while there is something in it."""

    def __init__(self) -> None:
        self._events: deque[TransportEvent] = deque()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, event: TransportEvent) -> None:
        self._events.append(event)
        os.eventfd_write(self._wakeup, 1)

    def take(self) -> list[TransportEvent]:
        """Everything so far. Clears the descriptor first: an event put meanwhile makes it readable again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)
        return [self._events.popleft() for _ in range(len(self._events))]

    def fileno(self) -> int:
        return self._wakeup

    def close(self) -> None:
        os.close(self._wakeup)
