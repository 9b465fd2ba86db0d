"""Asks peers that the registry names no longer whether they live, and tells what is gone.

    1. due        the registry has lost a peer (`peers`)
    2. asked      the registry: whether a signed verdict says that it is over; then the peer itself, by a ping over an
                  authenticated socket
    3. answered   it stays a peer: it does not reach Redis, or Redis has lost it
       or gone    the engine drops its agents, mappings and grants, and the verdict is signed and written, so that the
                  incarnation ends when it reaches Redis again: its peers act on nothing that it says any more

Without Redis nothing is due. A verdict that cannot be written is written after a later heartbeat.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tandem_engine.ipc.channels import IpcContext
from tandem_services.common.engine_ping import answers
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.choice import WorkerView
from tandem_services.router.registry import FleetSnapshot
from tandem_services.worker.peers import PeerWatch

ANSWER_S = 2.0
"""As long as lines between processes may be silent (`channels.HEARTBEAT_TIMEOUT_MS`)."""


class Verdicts(Protocol):
    """The registry, as far as it tells and takes who is over."""

    async def snapshot(self, missing: Iterable[str] = ()) -> FleetSnapshot: ...

    async def fence(self, incarnation: str, *, by: str) -> None: ...


@dataclass(kw_only=True, slots=True)
class PeerChecks:
    """Of one worker. Belongs to its event loop."""

    registry: Verdicts
    watch: PeerWatch
    context: IpcContext
    gone: Callable[[str], None]
    answer_s: float = ANSWER_S
    _endpoints: dict[str, str] = field(default_factory=dict)
    """Of the engines of peers, from signed rows."""
    _asked: set[str] = field(default_factory=set)
    _unwritten: set[str] = field(default_factory=set)
    """Found dead, and Redis has not taken the verdict yet."""

    def observe(self, views: Iterable[WorkerView]) -> None:
        """Where peers are, as a snapshot says."""
        self._endpoints |= {view.incarnation: view.request_endpoint for view in views}

    @property
    def pending(self) -> bool:
        """Whether there is anything to ask or to write."""
        return bool(self._unwritten or self.watch.due() - self._asked)

    async def run_due(self) -> None:
        """Ask whoever is due and not asked yet. Takes `answer_s` at most, and what Redis takes."""
        due = self.watch.due() - self._asked
        self._asked |= due
        try:
            await self._write()
            await self._ask(due)
        except RedisUnavailableError:
            return
        finally:
            self._asked -= due

    async def _ask(self, due: frozenset[str]) -> None:
        snapshot = await self.registry.snapshot(missing=sorted(due))
        self.observe(record.view for record in snapshot.workers)
        for incarnation in sorted(due & snapshot.fenced):
            self._drop(incarnation)
        asked = sorted(due - snapshot.fenced)
        for incarnation, lives in zip(asked, await asyncio.gather(*map(self._lives, asked)), strict=True):
            if lives:
                self.watch.answered(incarnation)
            elif incarnation in self.watch.due():  # not registered again meanwhile
                self._drop(incarnation)
                self._unwritten.add(incarnation)
        await self._write()

    async def _lives(self, incarnation: str) -> bool:
        """Not, where it never was in a row: it lived between two looks at the registry."""
        endpoint = self._endpoints.get(incarnation)
        return endpoint is not None and await answers(self.context, endpoint, incarnation, within_s=self.answer_s)

    def _drop(self, incarnation: str) -> None:
        self.watch.forget(incarnation)
        self._endpoints.pop(incarnation, None)
        self.gone(incarnation)

    async def _write(self) -> None:
        for incarnation in sorted(self._unwritten):
            await self.registry.fence(incarnation, by=self.watch.own)
            self._unwritten.discard(incarnation)
