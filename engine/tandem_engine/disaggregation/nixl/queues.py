"""Commands to the transfer thread (see also `transport.DigestOrder`), its outbox, and unexpected errors in it."""

import contextlib
import logging
import math
import os
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeAlias

from tandem_engine.base.clock import Clock
from tandem_engine.disaggregation.transport import DigestOrder, Push, TransportEvent
from tandem_engine.messages.transfer import Hello


@dataclass(frozen=True, slots=True)
class Connect:
    hello: Hello


@dataclass(frozen=True, slots=True)
class Forget:
    incarnation: str


@dataclass(frozen=True, slots=True)
class StartPush:
    push: Push


@dataclass(frozen=True, slots=True)
class Expect:
    transfers: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Look at outstanding pushes now."""


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Command: TypeAlias = Connect | Forget | StartPush | DigestOrder | Expect | Wake | Stop


logger = logging.getLogger(__name__)

AGAIN_AFTER = 1.0
"""Seconds after which the same error is logged again. It may happen a thousand times a second."""


@dataclass(kw_only=True, slots=True)
class TransportErrors:
    """Counts them, and logs them with their tracebacks. Written by one thread; any may read `count`."""

    clock: Clock
    count: int = 0
    """Since start."""
    _silent_until: dict[str, float] = field(default_factory=dict)

    def attempt(self, during: str, peer: str = "") -> "Attempt":
        """To do something in, which is one of few; `peer` is concerned."""
        return Attempt(errors=self, during=during, peer=peer)

    def note(self, error: Exception, during: str, peer: str) -> None:
        self.count += 1
        now = self.clock.now()
        if now >= self._silent_until.get(during, -math.inf):
            self._silent_until[during] = now + AGAIN_AFTER
            peer_note = f" (peer {peer})" if peer else ""
            logger.error("transfers: unexpected error while %s%s", during, peer_note, exc_info=error)


@dataclass(kw_only=True, slots=True)
class Attempt:
    """A context that ends like any other whatever is raised in it."""

    errors: TransportErrors
    during: str
    peer: str
    failed: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        self.failed = True
        self.errors.note(error, self.during, self.peer)
        return True


class Outbox:
    """A queue with a descriptor that is readable while there is something in it."""

    def __init__(self) -> None:
        self._events: deque[TransportEvent] = deque()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, event: TransportEvent) -> None:
        self._events.append(event)
        os.eventfd_write(self._wakeup, 1)

    def take(self) -> list[TransportEvent]:
        """Everything so far. Clears the descriptor first: an event put in the meantime makes it readable again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)
        return [self._events.popleft() for _ in range(len(self._events))]

    def fileno(self) -> int:
        return self._wakeup

    def close(self) -> None:
        os.close(self._wakeup)
