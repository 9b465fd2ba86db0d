"""Fairness of the gateway's queue: the order of requests, overload, and fairness between gateways. Pure except reports.

`FairQueue` orders by priority, then by the least virtual tokens of the tenant (`VirtualCounters`) with the prompt that
is tried, then by arrival; of equals, a tenant that was behind until it came is first. With the prompt, because a long
one that has no room would otherwise keep short ones waiting that add up to less.
The key file bounds the priority of each tenant. When the queue is full, a new request replaces the last request of the
tenant that holds the most seats for its weight. A flood of one tenant therefore displaces only requests of that tenant.

`SharedCounters` charges virtual tokens locally at once and reports them to Redis every `SYNC_S`; no request waits for
a report. Redis adds up all reports, so that a tenant with requests at several gateways has one position at all of them.
Without Redis, or with an unreadable reply, the local counters decide; unsent charges are reported later.

`HeadYield` decides when a gateway leaves capacity to others. A slot that a request frees is reused first at the same
gateway, so a tenant that waits alone there would keep it, whatever the queues of the others:

    head      the head of line of a gateway has waited `HEAD_AFTER_S`: it is reported with the counters
    ahead     the head of line here has used more than the head of another gateway, by more than the cost of its prompt,
              or that head has greater priority. Redis reports both values for one moment, so at least one gateway, that
              of the tenant with the least usage, is not ahead: all gateways never yield to each other
    yield     for `YIELD_S` the head of line is not tried, and freed slots are offered in Redis (`Report.left`)
    take      then, for `TAKE_S` from its next time at the head, it competes as if no other gateway waited: unused slots
              stay empty for at most `YIELD_S`, and no request waits forever

A request that has used less may be next in between and is tried. The periods of the others continue: restarted after
each such request, they would never reach `take`. A report counts for `FRESH_S`; without one no gateway yields.
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Generic, Protocol, TypeVar

from tandem_engine.base.clock import Clock
from tandem_services.common.redis_client import RedisUnavailableError, UnreadableReplyError
from tandem_services.router.shared_state import Charge, QueueHead, Report, Standing
from tandem_services.router.usage_counters import VirtualCounters


@dataclass(kw_only=True, slots=True, eq=False)
class Waiting:
    """One request in the queue."""

    tenant: str
    weight: float
    priority: int
    arrived: float
    number: int = 0
    """Given by the queue, in order of arrival."""
    cost: float = 0.0
    """Of its prompt, in virtual tokens over the weight."""
    is_behind: bool = False
    """On arrival its tenant had had less than each other one of the last seconds will have had after its next request,
    by more than this prompt."""
    not_before: float = float("-inf")
    """No worker could take it at the last try: others are tried until then."""


def _order(waiting: Waiting) -> tuple[int, int]:
    return (-waiting.priority, waiting.number)


W = TypeVar("W", bound=Waiting)


@dataclass(kw_only=True, slots=True)
class FairQueue(Generic[W]):
    """One per model service; belongs to its event loop."""

    seats: int
    counters: VirtualCounters
    _by_tenant: dict[str, list[W]] = field(default_factory=dict)
    _size: int = 0
    _arrivals: int = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[W]:
        return (waiting for line in self._by_tenant.values() for waiting in line)

    @property
    def lengths(self) -> dict[str, int]:
        """How many wait, by tenant."""
        return {tenant: len(line) for tenant, line in self._by_tenant.items()}

    def holds(self, tenant: str) -> bool:
        """Whether a request of it waits."""
        return tenant in self._by_tenant

    def add(self, arriving: W) -> W | None:
        """Add a request. Returns the one without a seat then: the new one, or another that it displaced."""
        loser = self._loser(arriving) if self._size >= self.seats else None
        if loser is arriving:
            return arriving
        if loser is not None:
            self.remove(loser)
        self.counters.arrive(arriving.tenant)
        self._arrivals += 1
        arriving.number = self._arrivals
        insort(self._by_tenant.setdefault(arriving.tenant, []), arriving, key=_order)
        self._size += 1
        return loser

    def next(self, now: float, held: Callable[[W], bool] | None = None) -> W | None:
        """The request to try, which stays in the queue. None when no request is to be tried now. `held`: which ones are
        not."""
        heads = (self._head(line, now, held) for line in self._by_tenant.values())
        return min((head for head in heads if head is not None), key=self._rank, default=None)

    def ahead(self, tenant: str, *, priority: int, cost: float) -> list[W]:
        """Requests that are served before a new one of `tenant`, whose prompt costs so much, if no others come."""
        own = [each for each in self._by_tenant.get(tenant, []) if each.priority >= priority]
        level = self.counters.value(tenant) + sum(each.cost for each in own) + cost
        found = list(own)
        for other, line in self._by_tenant.items():
            value = self.counters.value(other)
            for each in line if other != tenant else ():
                value += each.cost
                if each.priority > priority or (each.priority == priority and value <= level):
                    found.append(each)
        return found

    def after_next(self, tenant: str) -> float:
        """What `tenant` will have had after its next request, or has had if none waits."""
        line = self._by_tenant.get(tenant)
        return self._after(line[0]) if line else self.counters.value(tenant)

    def remove(self, waiting: W) -> bool:
        """It is served, or waits no more. False when it was not there."""
        line = self._by_tenant.get(waiting.tenant, [])
        if waiting not in line:
            return False
        line.remove(waiting)
        self._size -= 1
        if not line:
            del self._by_tenant[waiting.tenant]
            self.counters.leave(waiting.tenant)
        return True

    def _head(self, line: list[W], now: float, held: Callable[[W], bool] | None) -> W | None:
        return next((each for each in line if each.not_before <= now and not (held and held(each))), None)

    def _rank(self, waiting: W) -> tuple[int, float, bool, int]:
        # Its arrival has made a tenant that was behind level with the others.
        return (-waiting.priority, self._after(waiting), not waiting.is_behind, waiting.number)

    def _after(self, waiting: W) -> float:
        return self.counters.value(waiting.tenant) + waiting.cost

    def _loser(self, arriving: W) -> W:
        own = self._by_tenant.get(arriving.tenant, [])
        held = (len(own) + 1) / arriving.weight
        largest = max(self._by_tenant.values(), key=_share, default=[])
        if largest and largest is not own and _share(largest) > held:
            return largest[-1]
        # Its own tenant holds the most seats. A new request of greater priority displaces one of lower priority.
        return own[-1] if own and own[-1].priority < arriving.priority else arriving


def _share(line: Sequence[Waiting]) -> float:
    return len(line) / line[0].weight


HEAD_AFTER_S = 0.3

YIELD_S = 0.8
"""Long enough for an offer to be found, and for what was charged for it to come back."""

TAKE_S = 0.2
"""One report, in which unused offers return."""

FRESH_S = 1.0


def queue_head(head: Waiting | None, now: float) -> QueueHead | None:
    """Of the gateway where `head` is next."""
    if head is None or now - head.arrived < HEAD_AFTER_S:
        return None
    return QueueHead(priority=head.priority, tenant=head.tenant)


@dataclass(kw_only=True, slots=True)
class HeadYield:
    """One per queue; belongs to its event loop."""

    clock: Clock
    _standing: Standing | None = None
    _updated_at: float = 0.0
    _ahead_at: float = float("-inf")
    """When a request that is ahead was last at the head here."""
    _gives_until: float = 0.0
    _takes_until: float | None = None
    """None until a request that is ahead is at the head after `_gives_until`."""

    def update(self, standing: Standing) -> None:
        """What Redis answered to the last report."""
        self._standing, self._updated_at = standing, self.clock.now()

    def yields(self, head: Waiting, cost: float) -> bool:
        """Whether `head`, the head of line here, is not to be tried now. `cost`: of its prompt, over its weight."""
        if self._standing is None:
            return False
        now = self.clock.now()
        if not self._ahead(head, cost, now):
            return False
        first = now - self._ahead_at > YIELD_S + TAKE_S
        self._ahead_at = now
        if first or (self._takes_until is not None and now >= self._takes_until):
            self._gives_until, self._takes_until = now + YIELD_S, None
        elif self._takes_until is None and now >= self._gives_until:
            self._takes_until = now + TAKE_S
        return self._takes_until is None

    def _ahead(self, head: Waiting, cost: float, now: float) -> bool:
        standing = self._standing
        if standing is None or now - self._updated_at > FRESH_S or head.tenant not in standing.values:
            return False
        least = standing.values[head.tenant] - cost
        return any(
            other.priority > head.priority or (other.priority == head.priority and other.value < least)
            for other in standing.heads
        )


SYNC_S = 0.2


class Board(Protocol):
    """Counters that all gateways share; see `FairBoard`."""

    async def sync(self, report: Report) -> Standing:
        """Raises `RedisUnavailableError`, or `UnreadableReplyError` after it has added up the report."""
        ...


@dataclass(kw_only=True, slots=True)
class SharedCounters:
    """One per model service; belongs to its event loop."""

    counters: VirtualCounters
    board: Board | None = None
    gateway: str = field(default_factory=lambda: token_hex(8))
    """Name of this one among those that share the board."""
    _pending: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Charged since the last report."""
    _reported_waiting: frozenset[str] = frozenset()

    def charge(self, tenant: str, cost: float) -> None:
        """`cost`: virtual tokens over the tenant's weight."""
        self.counters.charge(tenant, cost)
        if self.board is not None:
            self._pending[tenant] += cost

    async def sync(self, *, head: QueueHead | None = None, left: int = 0, wanted: int = 0) -> Standing | None:
        """Report, and take over where tenants stand. Redis away, or nothing to say: None, and next time. None as well
        for an answer that cannot be read."""
        waiting = self.counters.backlogged
        names = self._pending.keys() | waiting | self._reported_waiting
        if self.board is None or not names:
            return None
        sent, self._pending = self._pending, defaultdict(float)
        charges = [Charge(tenant=name, cost=sent.get(name, 0.0), waits=name in waiting) for name in sorted(names)]
        report = Report(gateway=self.gateway, charges=charges, head=head, left=left, wanted=wanted)
        try:
            standing = await self.board.sync(report)
        except UnreadableReplyError:
            # Redis has applied this report; a retry would count it twice.
            self._reported_waiting = waiting
            return None
        except RedisUnavailableError:
            for name, cost in sent.items():
                self._pending[name] += cost
            return None
        self._reported_waiting = waiting
        # Redis's values lack what was charged during the call.
        values = {name: value + self._pending.get(name, 0.0) for name, value in standing.values.items()}
        self.counters.adopt(values, standing.floor)
        return standing
