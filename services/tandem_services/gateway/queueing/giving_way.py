"""Whether a gateway leaves its places to others, since at one of them somebody waits who has had less. Pure.

Each gateway serves its own queue in the order of fairness. But a place that a request of a gateway has left is taken
there first, so a tenant that waits alone at one would keep what it has, whoever waits at another.

    wish      who is next at a gateway and has waited for `WISH_AFTER_S` is told to the others, with the counters: where
              requests get places all the time, they need none that are given away
    ahead     who is next here has had more than a wish of another gateway, by more than its prompt costs; or that wish
              is of greater priority. Both figures are Redis's of the same moment, so of all gateways one at least, that
              whose tenant has had least, is not ahead: it never happens that all give way to each other
    gives way for `YIELD_S` whoever is next here is not tried, and places that its requests leave are offered
              in Redis (`Report.left`), where a gateway that does not give way finds them with its next report
    takes     then, for `TAKE_S` from when it is next again, as if nobody else waited: what nobody wanted is not left
              empty for longer than `YIELD_S`, and nobody is kept waiting for ever

Somebody who has had less may be next here in between, and is tried. What the others have to wait for goes on meanwhile:
they would start to give way anew after each of them, and never take.

What was heard counts for `FRESH_S`. Redis away, or nothing heard: nobody gives way.
"""

from dataclasses import dataclass

from tandem_engine.clock import Clock
from tandem_services.gateway.queueing.fair_queue import Waiting
from tandem_services.router.fair_board import Standing, Wish

WISH_AFTER_S = 0.3
YIELD_S = 0.8
"""Long enough for an offer to be found, and for what was charged for it to come back."""
TAKE_S = 0.2
"""One report, with which offers that nobody took come back."""
FRESH_S = 1.0


def wish_of(head: Waiting | None, now: float) -> Wish | None:
    """Of the gateway where `head` is next."""
    if head is None or now - head.arrived < WISH_AFTER_S:
        return None
    return Wish(priority=head.priority, tenant=head.tenant)


@dataclass(kw_only=True, slots=True)
class GivingWay:
    """One per queue; belongs to its event loop."""

    clock: Clock
    _standing: Standing | None = None
    _heard_at: float = 0.0
    _ahead_at: float = float("-inf")
    """When somebody who is ahead was next here last."""
    _gives_until: float = 0.0
    _takes_until: float | None = None
    """None until somebody who is ahead is next once `_gives_until` is over."""

    def heard(self, standing: Standing) -> None:
        """What Redis answered to the last report."""
        self._standing, self._heard_at = standing, self.clock.now()

    def gives_way(self, head: Waiting, cost: float) -> bool:
        """Whether `head`, who is next here, is not to be tried now. `cost`: of its prompt, over its weight."""
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
        if standing is None or now - self._heard_at > FRESH_S or head.tenant not in standing.values:
            return False
        least = standing.values[head.tenant] - cost
        return any(
            wish.priority > head.priority or (wish.priority == head.priority and wish.value < least)
            for wish in standing.wishes
        )
