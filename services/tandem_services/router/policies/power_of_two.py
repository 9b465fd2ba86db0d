"""`power_of_two`: the less loaded of two at random. Gateways that know only of their own work do not herd."""

from collections.abc import Sequence
from random import Random

from tandem_services.router.choice import RouteQuery
from tandem_services.router.policies.policy import Contender


class PowerOfTwo:
    def __init__(self, random: Random) -> None:
        self._random = random

    def narrow(self, contenders: Sequence[Contender], query: RouteQuery) -> Sequence[Contender]:  # noqa: ARG002
        two = self._random.sample(contenders, min(2, len(contenders)))
        return [min(two, key=lambda each: each.outstanding)]
