"""Why a worker ends, and with which status its process exits. Several parts may want it to; the first says why."""

import asyncio
from dataclasses import dataclass, field

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_ENGINE_REFUSED = 3
"""The engine said why it cannot start: a checkpoint or a flag that cannot work."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The sentence is for the log."""

    status: int
    reason: str


@dataclass(slots=True)
class FirstEnding:
    """Of one worker. Made in its event loop."""

    _said: "asyncio.Future[Ending]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def say(self, status: int, reason: str) -> None:
        """Whoever was first counts."""
        if not self._said.done():
            self._said.set_result(Ending(status, reason))

    async def wait(self) -> Ending:
        """Until somebody has said so."""
        return await self._said
