"""Counters of the usage of tenants: windows for limits, and virtual tokens for fairness. Pure.

Redis holds the same for all gateways (`scripts/usage.lua`, `scripts/fair.lua`). These are the values of one gateway,
which it uses between reports and while Redis is unavailable.

`UsageWindows` counts requests and tokens of the last minute, and running requests. A second counts until it has been
over for a minute, so no minute exceeds the limit.

`VirtualCounters` count the work done for each tenant, divided by its weight (VTC; Sheng et al., "Fairness in Serving
Large Language Models", OSDI'24). Of the waiting tenants the one with the least is served first, so none gets less than
another by more than the cost of a few requests. Unused share is not saved up:

    arrives   a tenant without waiting requests is raised to the least of those that wait, or to where the last one left
    charged   prompt tokens when they are computed, output tokens as they arrive
    leaves    none of its requests waits any more

A counter below the value to which its tenant would be raised is forgotten, which bounds the memory.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heapify, heappop, heappush

WINDOW_S = 60


class Refused(StrEnum):
    """Which limit an ask would have broken."""

    NOTHING = ""
    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageLimits:
    """Limits of one tenant. 0: no limit."""

    requests: int = 0
    """A minute."""
    tokens: int = 0
    """A minute."""
    concurrency: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What one request requires, all or nothing."""

    requests: int = 0
    tokens: int = 0
    lease: str = ""
    """Its name among those that run; "" where it takes no such place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """The answer to an ask: whether it was granted, and what is used now."""

    refused: Refused
    second: int
    """In which the tokens were taken; of the clock that decided."""
    retry_s: float | None
    """When a refused ask may succeed; None for never."""
    requests: int
    requests_reset_s: float
    """Until none counts any more."""
    tokens: int
    tokens_reset_s: float


@dataclass(slots=True)
class _Window:
    """Amounts by second, oldest first."""

    taken: OrderedDict[int, int] = field(default_factory=OrderedDict)
    total: int = 0

    def forget(self, now_s: int) -> None:
        while self.taken and next(iter(self.taken)) < now_s - WINDOW_S:
            self.total -= self.taken.popitem(last=False)[1]

    def add(self, second: int, amount: int) -> None:
        held = self.taken.get(second, 0)
        self.taken[second] = max(0, held + amount)
        self.total += self.taken[second] - held

    def fits(self, amount: int, limit: int) -> bool:
        return limit == 0 or amount == 0 or self.total + amount <= limit

    def retry_s(self, amount: int, limit: int, now: float) -> float | None:
        if amount > limit:
            return None
        left = self.total
        for second, held in self.taken.items():
            left -= held
            if left + amount <= limit:
                return second + WINDOW_S + 1 - now
        return 0.0

    def reset_s(self, now: float) -> float:
        return next(reversed(self.taken)) + WINDOW_S + 1 - now if self.taken else 0.0


@dataclass(slots=True)
class UsageWindows:
    """Usage of one tenant within the window. Times are seconds of a monotonic clock."""

    _requests: _Window = field(default_factory=_Window)
    _tokens: _Window = field(default_factory=_Window)
    _running: set[str] = field(default_factory=set)

    @property
    def idle(self) -> bool:
        """Nothing to remember."""
        return not (self._running or self._requests.taken or self._tokens.taken)

    @property
    def running(self) -> frozenset[str]:
        """Leases that have not ended."""
        return frozenset(self._running)

    def take(self, limits: UsageLimits, ask: Ask, now: float) -> Usage:
        self.forget(now)
        refused, retry_s = self._verdict(limits, ask, now)
        if refused is Refused.NOTHING:
            self.note(ask, now)
        return Usage(
            refused=refused,
            second=int(now),
            retry_s=retry_s,
            requests=self._requests.total,
            requests_reset_s=self._requests.reset_s(now),
            tokens=self._tokens.total,
            tokens_reset_s=self._tokens.reset_s(now),
        )

    def note(self, ask: Ask, now: float) -> None:
        """Take, whatever the limits: it was granted elsewhere."""
        if ask.requests:
            self._requests.add(int(now), ask.requests)
        if ask.tokens:
            self._tokens.add(int(now), ask.tokens)
        if ask.lease:
            self._running.add(ask.lease)

    def settle(self, second: int, tokens: int, now: float) -> None:
        """`tokens` used beyond those taken in `second`; below 0: not used, given back where they were taken."""
        if tokens > 0:
            self._tokens.add(int(now), tokens)
        elif tokens < 0 and second in self._tokens.taken:
            self._tokens.add(second, tokens)

    def end(self, lease: str) -> None:
        self._running.discard(lease)

    def forget(self, now: float) -> None:
        """Drop what counts no more."""
        self._requests.forget(int(now))
        self._tokens.forget(int(now))

    def _verdict(self, limits: UsageLimits, ask: Ask, now: float) -> tuple[Refused, float | None]:
        if not self._requests.fits(ask.requests, limits.requests):
            return Refused.REQUESTS, self._requests.retry_s(ask.requests, limits.requests, now)
        if not self._tokens.fits(ask.tokens, limits.tokens):
            return Refused.TOKENS, self._tokens.retry_s(ask.tokens, limits.tokens, now)
        if ask.lease and 0 < limits.concurrency <= len(self._running):
            return Refused.CONCURRENCY, 0.0
        return Refused.NOTHING, 0.0


MAX_TENANTS = 4_096
"""More counters than this are malformed, or of a deployment that has more keys than fit into a key file."""

UNCACHED_WEIGHT = 1.0

MIN_DELETED = 16
"""Counters that are deleted together, at least: to look for one would cost as much as to look for all."""

OUTPUT_WEIGHT = 2.0
"""An output token takes a step by itself; the weights are those of the paper."""

CACHED_WEIGHT = 0.1
"""A prompt token found in a prefix cache costs memory, not computation."""


def prompt_cost(prompt_tokens: int, cached_tokens: int) -> float:
    """Virtual tokens of a prompt of which so many tokens are cached."""
    if cached_tokens <= 0:
        return UNCACHED_WEIGHT * prompt_tokens
    cached = min(cached_tokens, prompt_tokens)
    return UNCACHED_WEIGHT * (prompt_tokens - cached) + CACHED_WEIGHT * cached


@dataclass(kw_only=True, slots=True)
class VirtualCounters:
    """Belongs to one event loop."""

    floor: float = 0.0
    """Where the last tenant left."""
    _values: dict[str, float] = field(default_factory=dict)
    """Of some tenants at the floor as well: they are deleted when they are about as many as the others."""
    _backlogged: set[str] = field(default_factory=set)
    _recent: set[str] = field(default_factory=set)
    """Tenants whose value counts even below the floor: it was written, or they left the queue, after the floor was."""
    _kept: int = 0
    """Values that the last deletion left."""
    _lowest: list[tuple[float, str]] = field(default_factory=list)
    """A heap of values that tenants of the queue have or had, with their names. All that they have now are in it."""

    def value(self, tenant: str) -> float:
        value = self._values.get(tenant, self.floor)
        return self.floor if self._is_forgotten(tenant, value) else value

    @property
    def backlogged(self) -> frozenset[str]:
        """Tenants with something waiting."""
        return frozenset(self._backlogged)

    def arrive(self, tenant: str) -> None:
        """A request of it waits from now on. Does nothing when one waits already."""
        if tenant in self._backlogged:
            return
        level = max(self.value(tenant), self._level())
        self._backlogged.add(tenant)
        self._write(tenant, level)

    def charge(self, tenant: str, cost: float) -> None:
        """`cost`: virtual tokens over its weight; below 0 takes back what was charged too much."""
        self._write(tenant, self.value(tenant) + cost)

    def leave(self, tenant: str) -> None:
        """Nothing of it waits any more."""
        if tenant in self._backlogged:
            self._backlogged.remove(tenant)
            self._recent.add(tenant)
        if not self._backlogged:
            self.floor = max(self.floor, self.value(tenant))
            self._forget()

    def pass_by(self, tenant: str) -> None:
        """As `arrive` and then `leave`: a request that did not wait. Nothing else of it waits."""
        if self._backlogged:
            self._write(tenant, max(self.value(tenant), self._level()))
            return
        # It was level with the floor alone, which is where it leaves.
        self.floor = max(self._values.pop(tenant, self.floor), self.floor)
        if self._values:
            self._forget()

    def adopt(self, values: dict[str, float], floor: float) -> None:
        """What all gateways together have counted."""
        self._delete()  # by the floor of before, which may have been higher
        self._values.update(values)
        self.floor = floor
        self._recent.clear()
        self._delete()
        self._note_lowest()

    def _write(self, tenant: str, value: float) -> None:
        self._values[tenant] = value
        self._recent.add(tenant)
        if tenant in self._backlogged:
            heappush(self._lowest, (value, tenant))
            if len(self._lowest) > 2 * len(self._backlogged) + MIN_DELETED:
                self._note_lowest()

    def _level(self) -> float:
        """The lowest value in the queue, or the floor."""
        while self._lowest:
            value, tenant = self._lowest[0]
            if tenant in self._backlogged and self._values[tenant] == value:
                return value
            heappop(self._lowest)
        return self.floor

    def _note_lowest(self) -> None:
        """Those of now alone."""
        self._lowest = [(self._values[tenant], tenant) for tenant in self._backlogged]
        heapify(self._lowest)

    def _is_forgotten(self, tenant: str, value: float) -> bool:
        return value <= self.floor and tenant not in self._recent and tenant not in self._backlogged

    def _forget(self) -> None:
        """Values up to the floor count no more. Costs the same, by request, with any number of tenants."""
        self._recent.clear()
        if len(self._values) > 2 * self._kept + MIN_DELETED:
            self._delete()

    def _delete(self) -> None:
        """What is forgotten."""
        self._values = {name: value for name, value in self._values.items() if not self._is_forgotten(name, value)}
        self._kept = len(self._values)
