"""Before any policy: newcomers take part only so often as their share says (`newcomers`)."""

from collections.abc import Callable, Sequence
from random import Random

from tandem_services.router.choice import RouteQuery
from tandem_services.router.policies.policy import Contender, Policy


class Ramping:
    """`policy` among those that take part. A worker alone always does."""

    def __init__(self, policy: Policy, share: Callable[[str], float], random: Random) -> None:
        """`share`: 0 to 1 by incarnation."""
        self._policy = policy
        self._share = share
        self._random = random

    def narrow(self, contenders: Sequence[Contender], query: RouteQuery) -> Sequence[Contender]:
        taking_part = [each for each in contenders if self._takes_part(each.incarnation)]
        return self._policy.narrow(taking_part or contenders, query)

    def _takes_part(self, incarnation: str) -> bool:
        share = self._share(incarnation)
        return share >= 1.0 or self._random.random() < share
