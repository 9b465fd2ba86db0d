"""Around any policy: now and then a worker at random, so that rates, links and caches of those that a policy never
picks stay known (`--router-exploration`).
"""

from collections.abc import Sequence
from random import Random

from tandem_services.router.choice import RouteQuery
from tandem_services.router.policies.policy import Contender, Policy


class Exploring:
    """`policy`, but for a `share` of all queries anybody."""

    def __init__(self, policy: Policy, share: float, random: Random) -> None:
        self._policy = policy
        self._share = share
        self._random = random

    def narrow(self, contenders: Sequence[Contender], query: RouteQuery) -> Sequence[Contender]:
        if self._random.random() < self._share:
            return [self._random.choice(contenders)]
        return self._policy.narrow(contenders, query)
