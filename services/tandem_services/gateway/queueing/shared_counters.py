"""Virtual token counters that all gateways share: charged here at once, reported to Redis a few times a second.

Redis adds up what gateways report and says where tenants stand, so that a tenant that asks several gateways is behind
at each of them where another waits. No request waits for a report. Redis away: the counters of this gateway decide,
and what it has charged meanwhile is reported when Redis is back. They decide as well where Redis gives
an answer that cannot be read, which the board logs.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Protocol

from tandem_services.common.redis_client import RedisUnavailableError, UnreadableReplyError
from tandem_services.router.fair_board import Charge, Report, Standing, Wish
from tandem_services.router.virtual_counters import VirtualCounters

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
    _told_waiting: frozenset[str] = frozenset()

    def charge(self, tenant: str, cost: float) -> None:
        """`cost`: virtual tokens over the tenant's weight."""
        self.counters.charge(tenant, cost)
        if self.board is not None:
            self._pending[tenant] += cost

    async def sync(self, *, wish: Wish | None = None, left: int = 0, wanted: int = 0) -> Standing | None:
        """Report, and take over where tenants stand. Redis away, or nothing to say: None, and next time. None as well
        for an answer that cannot be read."""
        waiting = self.counters.backlogged
        names = self._pending.keys() | waiting | self._told_waiting
        if self.board is None or not names:
            return None
        sent, self._pending = self._pending, defaultdict(float)
        charges = [Charge(tenant=name, cost=sent.get(name, 0.0), waits=name in waiting) for name in sorted(names)]
        report = Report(gateway=self.gateway, charges=charges, wish=wish, left=left, wanted=wanted)
        try:
            standing = await self.board.sync(report)
        except UnreadableReplyError:
            # It has been added up: told again, it would count twice.
            self._told_waiting = waiting
            return None
        except RedisUnavailableError:
            for name, cost in sent.items():
                self._pending[name] += cost
            return None
        self._told_waiting = waiting
        # What was charged while Redis was asked is in none of its figures.
        values = {name: value + self._pending.get(name, 0.0) for name, value in standing.values.items()}
        self.counters.adopt(values, standing.floor)
        return standing
