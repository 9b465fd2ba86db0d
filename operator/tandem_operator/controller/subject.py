"""A service as one turn of its lookout finds it."""

from dataclasses import dataclass

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.builders.served import Served
from tandem_operator.controller.facts import Parts
from tandem_operator.controller.objects import Seen
from tandem_operator.planning.observed import Observed
from tandem_operator.planning.plan import wanted_workers
from tandem_operator.telemetry.pods import PodSeen


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The service, what it owns, and its pods."""

    service: Seen
    wanted: Served
    status: ModelServiceStatus
    parts: Parts
    pods: tuple[PodSeen, ...]
    now: str
    """RFC 3339."""

    @property
    def rolling_out(self) -> bool:
        """Whether workers of another revision are there."""
        return any(one.replicas or one.pods for one in self.parts.deployments() if one.role and self._old(one.revision))

    @property
    def has_pairs(self) -> bool:
        """Whether anybody is to prefill apart: else no canary can go from one worker to another."""
        return wanted_workers(self.wanted, Observed(now=self.now, pools=self.parts.pools()))["prefill"] > 0

    def _old(self, revision: str | None) -> bool:
        return revision != self.status.revision
