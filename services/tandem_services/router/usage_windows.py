"""What one tenant uses: requests and tokens of the last minute, and requests that run. Pure.

A second counts until it has been over for a minute, so in no minute is more taken than the limit. `scripts/usage.lua`
is the same for all gateways together; this is what one gateway has seen, and decides by while Redis is away.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

WINDOW_S = 60


class Refused(StrEnum):
    """Which limit an ask would have broken."""

    NOTHING = ""
    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageLimits:
    """Of one tenant. 0: no limit."""

    requests: int = 0
    """A minute."""
    tokens: int = 0
    """A minute."""
    concurrency: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What one request wants to take, all or nothing."""

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
    """Of one tenant. Times are seconds of one clock that never goes back."""

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
        """Take, whatever the limits: somebody else has granted it."""
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
