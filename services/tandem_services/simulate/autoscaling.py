"""Workers that come and go during a run, as an autoscaler decides.

Each period   what came, waits and runs → `Load` → the scaler → workers that start, change their role, or leave
start         a worker is asked for, and joins after `start_s`; from the moment it is asked for it costs
flip          a worker leaves its role when it has finished what it has, and joins the other after `flip_s`
leave         the emptiest first; it costs until it has finished what it has
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from tandem_engine.config import Role
from tandem_operator.api.roles import ROLES, RoleName
from tandem_operator.scaling.load import DecodeLoad, Load, PrefillLoad
from tandem_operator.telemetry.demand import FIRST_SECONDS_EACH, SMOOTHING
from tandem_services.simulate.fleet import Fleet
from tandem_services.simulate.gateway import Held
from tandem_services.simulate.scalers import Counts, Scaler
from tandem_services.simulate.service_times import ServiceTimes
from tandem_services.simulate.worker import ModelledWorker

ROLE_OF: dict[RoleName, Role] = {"prefill": Role.PREFILL, "decode": Role.DECODE}

FLIP_S = 1.0
"""A live worker changes its role without loading anything (docs/operations.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingCosts:
    """What scaling takes."""

    period_s: float = 5.0
    start_s: float = 60.0
    """From the decision to a worker that takes requests: pod, image, weights, warming up."""


@dataclass(slots=True)
class Demand:
    """What came since the last look, as the operator takes it from what gateways count."""

    asked_tokens: float = 0.0
    requests: int = 0
    admitted_tokens: float = 0.0
    cached_tokens: float = 0.0
    """Of those, as the router predicted."""
    decode_s: float = 0.0
    """Of those that ended."""
    ended: int = 0
    seconds_each: float = FIRST_SECONDS_EACH
    """Smoothed."""
    cached_share: float = 0.0
    """Of prompt tokens, smoothed."""

    def asked(self, prompt_tokens: int) -> None:
        """A request has come."""
        self.requests += 1
        self.asked_tokens += prompt_tokens

    def admitted(self, prompt_tokens: int, cached_tokens: int) -> None:
        """It has a worker."""
        self.admitted_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    def finished(self, decode_s: float) -> None:
        """Its last token is out."""
        self.ended += 1
        self.decode_s += decode_s

    def take(self, period_s: float) -> tuple[float, float]:
        """Tokens without a cached prefix and requests per second; begins anew."""
        if self.ended:
            self.seconds_each += SMOOTHING * (self.decode_s / self.ended - self.seconds_each)
        if self.admitted_tokens:
            self.cached_share += SMOOTHING * (self.cached_tokens / self.admitted_tokens - self.cached_share)
        rates = self.asked_tokens / period_s * (1.0 - self.cached_share), self.requests / period_s
        self.asked_tokens, self.requests, self.admitted_tokens, self.cached_tokens = 0.0, 0, 0.0, 0.0
        self.decode_s, self.ended = 0.0, 0
        return rates


@dataclass(slots=True)
class Autoscaling:
    """One run's. `begin` plans the first look."""

    fleet: Fleet
    scaler: Scaler
    costs: ScalingCosts
    times: ServiceTimes
    max_sequences: int
    held: Callable[[], Held]
    """What waits at gateways."""
    demand: Demand = field(default_factory=Demand)
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
        wanted, flips = self.scaler.decide(self.load(), there)
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

    def load(self) -> Load:
        """What the operator would read from Redis."""
        tokens, requests = self.demand.take(self.costs.period_s)
        held = self.held()
        reports = {role: [each.load() for each in self.fleet.offered(ROLE_OF[role])] for role in ROLES}
        decode = self.fleet.offered(Role.DECODE)
        used = sum(each.cache.capacity - each.cache.room for each in decode)
        running = sum(report.sequences for report in reports["decode"])
        places = sum(report.max_sequences for report in reports["decode"])
        return Load(
            at=self.fleet.redis.events.now(),
            age_s=0.0,
            prefill=PrefillLoad(
                queued_tokens=sum(report.queue_tokens for report in reports["prefill"])
                + held.prompt_tokens * (1.0 - self.demand.cached_share),
                oldest_wait_s=held.oldest_wait_s,
                arrived_tokens_per_s=tokens,
                worker_tokens_per_s=self.times.prefill_rate,
            ),
            decode=DecodeLoad(
                running=min(running, places),
                waiting=max(0, running - places) + held.requests,
                oldest_wait_s=held.oldest_wait_s,
                arrived_per_s=requests,
                seconds_each=self.demand.seconds_each,
                worker_places=self.max_sequences,
                used_pages=used,
                worker_pages=self.fleet.cache_blocks,
            ),
            held=held.without_worker,
        )

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
