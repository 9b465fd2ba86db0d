"""`locality`, the default: the price decides among all, so cached prefixes and load count in the same seconds."""

from collections.abc import Sequence

from tandem_services.router.choice import RouteQuery
from tandem_services.router.policies.policy import Contender


class Locality:
    def narrow(self, contenders: Sequence[Contender], query: RouteQuery) -> Sequence[Contender]:  # noqa: ARG002
        return contenders
