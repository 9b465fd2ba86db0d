"""Standby: a registered worker serves requests that name it, but the router sends it none (`WorkerState.STANDBY`).

    --standby ─▶ on standby ─┬─ POST /offer: a canary has passed through it ─▶ offered, permanently
                             ├─ others with its `compat_hash` are offered, and it was not tested for `UNTRIED_S`
                             └─ no decode worker is offered, and one of its revision could decode, for `ALONE_S`

While an operator runs canaries, no worker gets client requests before its canary. The operator announces each canary
(POST /hold), and a worker whose canaries fail stays on standby. The second path is for workers without an operator, of
a revision that was proven before. The third keeps a model available: an untested revision is better than none. An
offered worker stays offered, so serving never depends on a live operator.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tandem_engine.base.clock import Clock
from tandem_engine.config import Role
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.decision import WorkerView
from tandem_services.router.registry import WorkerRecord, WorkerState
from tandem_services.router.views.fleet_reader import Snapshots

logger = logging.getLogger(__name__)
LOOK_S = 1.0

UNTRIED_S = 30.0
"""Longer than an operator takes to find a worker that stands by, or to be replaced by its second replica."""

HOLD_S = 45.0
"""After each word that a canary is on its way: longer than that one lasts, and than the pause until the next."""

ALONE_S = 60.0
"""Longer than an operator takes to send a canary, or to be replaced by another one."""


@dataclass(kw_only=True, slots=True)
class Standby:
    """Of one worker. `on` until it is offered."""

    on: bool
    fleet: Snapshots
    own: Callable[[], WorkerView]
    clock: Clock
    ended: Callable[[], None]
    """The registry should get it at once."""
    _alone_since: float | None = None
    _untried_since: float | None = None
    """Since when others of its revision are offered."""
    _held_until: float = -math.inf
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    def check(self) -> str | None:
        """What a worker on standby waits for; None for one that is offered."""
        return "on standby until a canary has passed through it" if self.on else None

    def hold(self) -> None:
        """A canary is testing it; its sender reports whether to offer it."""
        self._held_until = self.clock.now() + HOLD_S

    def offer(self, reason: str) -> None:
        """End it. Again: nothing."""
        if self.on:
            logger.info("%s is routable: %s", self.own().incarnation, reason)
            self.on = False
            self._over.set()
            self.ended()

    async def run(self) -> None:
        """Until it is offered, by any path. Without Redis no serving workers are known, and nothing changes."""
        while self.on:
            try:
                await self.look()
                async with asyncio.timeout(LOOK_S):
                    await self._over.wait()
            except TimeoutError:
                continue

    async def look(self) -> None:
        """Once at the registry."""
        try:
            snapshot = await self.fleet.snapshot()
        except RedisUnavailableError:
            self._alone_since = self._untried_since = None
            return
        own, now = self.own(), self.clock.now()
        others = [
            one for one in snapshot.workers if one.view.model == own.model and one.view.worker_id != own.worker_id
        ]
        if any(_offered(one) and one.view.compat_hash == own.compat_hash for one in others):
            self._alone_since = None
            self._untried_since = now if self._untried_since is None else self._untried_since
            if now - self._untried_since >= UNTRIED_S and now >= self._held_until:
                self.offer(f"other workers of its revision are, and no canary came for {UNTRIED_S:.0f} s")
            return
        self._untried_since = None
        if not no_other_worker_serves(own, others):
            self._alone_since = None
            return
        self._alone_since = now if self._alone_since is None else self._alone_since
        if now - self._alone_since >= ALONE_S:
            self.offer(f"no other worker served the model for {ALONE_S:.0f} s, and no canary came")


def no_other_worker_serves(own: WorkerView, others: Iterable[WorkerRecord]) -> bool:
    """Whether no decode worker is offered, and one of this revision could decode. `others`: of this model."""
    known = list(others)
    if any(_offered(one) and _decodes(one.view) for one in known):
        return False
    return _decodes(own) or any(_decodes(one.view) for one in known if one.view.compat_hash == own.compat_hash)


def _offered(record: WorkerRecord) -> bool:
    return record.state is WorkerState.READY


def _decodes(view: WorkerView) -> bool:
    return view.role is not Role.PREFILL
