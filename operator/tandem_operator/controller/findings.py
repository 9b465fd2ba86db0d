"""What is known of a service beyond its objects: canaries, links, decisions of the autoscaler.

Found out by asking its pods, every few seconds and beside reconciles, which only read it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tandem_operator.api.model_service import Decision
from tandem_operator.api.roles import ROLES, RoleName
from tandem_operator.controller.facts import Parts
from tandem_operator.controller.kinds import ServiceKey
from tandem_operator.planning.deletion import gateway_selector
from tandem_operator.planning.observed import Canary
from tandem_operator.planning.status import GATEWAY_CANARY
from tandem_operator.telemetry.looks import Seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """Of one service."""

    canaries: Mapping[str, Canary] = field(default_factory=dict)
    """As `Observed.canaries`."""
    failing: Mapping[str, str] = field(default_factory=dict)
    """Pods through which canaries fail, though their revision has passed: name → why."""
    links: Mapping[str, str] = field(default_factory=dict)
    """As `Observed.links`."""
    decisions: tuple[Decision, ...] | None = None
    """Newest first; None: none made since this operator leads, those in the status stay."""
    holding: str = ""
    """Why the autoscaler decides nothing; empty while it does."""
    pods: Seen | None = field(default=None, compare=False)
    """What pods said last. It changes each time and is no news."""


class FindingsBoard:
    """The newest of each service."""

    def __init__(self) -> None:
        self._of: dict[ServiceKey, Findings] = {}

    def of(self, key: ServiceKey) -> Findings | None:
        """None: nobody has looked yet."""
        return self._of.get(key)

    def put(self, key: ServiceKey, findings: Findings) -> bool:
        """Whether they are new."""
        before = self._of.get(key)
        self._of[key] = findings
        return before != findings

    def forget(self, key: ServiceKey) -> None:
        self._of.pop(key, None)

    def clear(self) -> None:
        self._of.clear()


def canaries_by_readiness(service: str, parts: Parts, roles: Iterable[RoleName] = ROLES) -> dict[str, Canary]:
    """A revision counts as one that answered when it has a ready pod of each of `roles`: with canaries switched off
    (`--canary off`), and where there are no pairs to ask, for nobody prefills apart.
    """
    ready: dict[str, set[RoleName]] = {}
    for one in parts.deployments():
        if one.revision is not None and one.role is not None and one.ready:
            ready.setdefault(one.revision, set()).add(one.role)
    passed = {revision: Canary(passed=True) for revision, found in ready.items() if found.issuperset(roles)}
    if passed and parts.ready_pods(gateway_selector(service)):
        passed[GATEWAY_CANARY] = Canary(passed=True)
    return passed
