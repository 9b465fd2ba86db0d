"""`round_robin`: one after the other, by name."""

from collections.abc import Sequence

from tandem_services.router.choice import RouteQuery
from tandem_services.router.policies.policy import Contender


class RoundRobin:
    """Remembers the name and not the position, so that workers may come and go."""

    def __init__(self) -> None:
        self._last = ""

    def narrow(self, contenders: Sequence[Contender], query: RouteQuery) -> Sequence[Contender]:  # noqa: ARG002
        following = [each for each in contenders if each.incarnation > self._last]
        chosen = (following or contenders)[0]
        self._last = chosen.incarnation
        return [chosen]
