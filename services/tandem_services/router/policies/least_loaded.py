"""`least_loaded`: whoever has least of this gateway's work; of equals one at random."""

from collections.abc import Sequence
from random import Random

from tandem_services.router.choice import RouteQuery
from tandem_services.router.policies.policy import Contender


class LeastLoaded:
    def __init__(self, random: Random) -> None:
        self._random = random

    def narrow(self, contenders: Sequence[Contender], query: RouteQuery) -> Sequence[Contender]:  # noqa: ARG002
        least = min(each.outstanding for each in contenders)
        return [self._random.choice([each for each in contenders if each.outstanding <= least])]
