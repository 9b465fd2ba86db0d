"""How much time of the event loop the outputs of running requests get while many requests wait to start.

An iteration of the loop starts a bounded number of requests, and handles whole messages of the engines. The more
streams run, the longer these take: the last requests of a burst would start when the first have ended. While more than
`CROWD` requests wait, outputs therefore get a quarter of the time. Those that come in between wait in the sockets, and
the tokens of a stream that are then read together are one event, so that they also cost less.

The connections share that quarter in turn: each reads again at the time that it was given when it came to rest. If one
that reads could delay those that rest, some would get no turn, and their workers would count as dead.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

CROWD = 16
"""Requests whose starts take an event loop about 6 ms."""

OTHERS = 3.0
"""Time for other work per time of outputs."""

MAX_PAUSE_S = 0.25
"""That a connection waits for other work and for other connections, once."""


def _none() -> int:
    return 0


@dataclass(slots=True)
class ReadingPace:
    """Shared by the readers of all connections of one event loop, which read one after the other."""

    starting: Callable[[], int] = _none
    """How many requests wait to start."""
    _due: float = 0.0
    """Event loop time at which the last of those that rest reads again."""

    @property
    def is_crowded(self) -> bool:
        return self.starting() > CROWD

    async def rest(self, took_s: float) -> None:
        """After outputs have taken the event loop `took_s`: until others have had their time, or none wait."""
        clock = asyncio.get_running_loop().time
        now = clock()
        self._due = due = min(max(self._due, now - took_s) + (1.0 + OTHERS) * took_s, now + MAX_PAUSE_S)
        while self.is_crowded and (left := due - clock()) > 0.0:  # noqa: ASYNC110  # what waits is counted, not announced
            await asyncio.sleep(min(0.01, left))
