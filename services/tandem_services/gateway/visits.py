"""Requests that somebody is answering, so that whoever closes it can wait for the last one."""

import asyncio
from dataclasses import dataclass, field


@dataclass(slots=True)
class Visits:
    """Of one model service. All methods belong to one event loop."""

    open: int = 0
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self) -> None:
        self.open += 1
        self._over.clear()

    def end(self) -> None:
        self.open -= 1
        if self.open == 0:
            self._over.set()

    async def over(self) -> None:
        """Returns when there is none."""
        if self.open:
            await self._over.wait()
