"""Workers that come and go during a run, as an autoscaler decides.

Each period   what came, waits and runs → `Load` → the scaler → workers that start, change their role, or leave
start         a worker is asked for, and joins after `start_s`; from the moment it is asked for it costs
flip          a worker leaves its role when it has finished what it has, and joins the other after `flip_s`
leave         the emptiest first; it costs until it has finished what it has
"""

from dataclasses import dataclass, field

from tandem_operator.api.roles import ROLES, RoleName
from tandem_services.simulate.fleet import Fleet
from tandem_services.simulate.scalers import Counts, Scaler
from tandem_services.simulate.seen_load import ROLE_OF, SeenLoad
from tandem_services.simulate.worker import ModelledWorker

FLIP_S = 1.0
"""A live worker changes its role without loading anything (docs/operations.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingCosts:
    """What scaling takes."""

    period_s: float = 5.0
    start_s: float = 60.0
    """From the decision to a worker that takes requests: pod, image, weights, warming up."""


@dataclass(slots=True)
class Autoscaling:
    """One run's. `begin` plans the first look."""

    fleet: Fleet
    scaler: Scaler
    costs: ScalingCosts
    seen: SeenLoad
    starting: Counts = field(default_factory=lambda: {"prefill": 0, "decode": 0})
    cancelled: Counts = field(default_factory=lambda: {"prefill": 0, "decode": 0})
    """Of those that start, as many are not wanted any more when they are there."""
    worker_seconds: float = 0.0
    most: int = 0
    changes: int = 0

    def begin(self) -> None:
        self.fleet.redis.events.after(self.costs.period_s, self._look)

    def there(self) -> Counts:
        """Workers of each role, those that start included."""
        return {role: len(self.fleet.offered(ROLE_OF[role])) + self._coming(role) for role in ROLES}

    async def _look(self) -> None:
        if self.fleet.closing:
            return
        paid = len(self.fleet.workers) + sum(self.starting.values())
        self.worker_seconds += paid * self.costs.period_s
        self.most = max(self.most, paid)
        await self.fleet.redis.follow()
        there = self.there()
        wanted, flips = self.scaler.decide(self.seen.load(self.costs.period_s), there)
        self.changes += wanted != there
        giver: RoleName = "decode" if flips > 0 else "prefill"
        taker: RoleName = "prefill" if flips > 0 else "decode"
        for _ in range(abs(flips)):
            await self._flip(giver, taker)
        now = self.there()
        for role in ROLES:
            for _ in range(wanted[role] - now[role]):
                self._start(role, self.costs.start_s)
            for _ in range(now[role] - wanted[role]):
                await self._stop(role)
        self.fleet.redis.events.after(self.costs.period_s, self._look)

    def _coming(self, role: RoleName) -> int:
        return self.starting[role] - self.cancelled[role]

    def _start(self, role: RoleName, seconds: float) -> None:
        if self.cancelled[role]:
            self.cancelled[role] -= 1
            return
        self.starting[role] += 1
        self.fleet.redis.events.after(seconds, lambda: self._join(role))

    async def _join(self, role: RoleName) -> None:
        self.starting[role] -= 1
        if self.cancelled[role]:
            self.cancelled[role] -= 1
            return
        if self.fleet.closing:
            return
        await self.fleet.redis.follow()
        await self.fleet.join(ROLE_OF[role])

    async def _stop(self, role: RoleName) -> None:
        if self._coming(role):
            self.cancelled[role] += 1
            return
        worker = self._emptiest(role)
        if worker is not None:
            await self.fleet.leave(worker)

    async def _flip(self, giver: RoleName, taker: RoleName) -> None:
        worker = self._emptiest(giver)
        if worker is not None:
            await self.fleet.leave(worker)
            self._start(taker, FLIP_S)

    def _emptiest(self, role: RoleName) -> ModelledWorker | None:
        return min(self.fleet.offered(ROLE_OF[role]), key=lambda each: each.outstanding, default=None)
