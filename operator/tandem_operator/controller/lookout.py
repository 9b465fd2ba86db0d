"""Looks after one service beyond its objects, one turn each period: asks its pods, and acts on what they say.

pods ─▶ figures ─▶ links slower than expected
                ─▶ the autoscaler (mode internal): costs of pods, then flips, then replicas of pools
     ─▶ canaries that are due
                                                    all of it ─▶ Findings, which reconciles read
"""

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import httpx

from tandem_operator.api.model_service import Decision, ModelServiceStatus
from tandem_operator.builders.naming import pool_name
from tandem_operator.builders.served import ROLES, Served
from tandem_operator.controller.canaries import Ask, CanaryBook, steady
from tandem_operator.controller.cluster import ApiError, Cluster
from tandem_operator.controller.events import EventPoster, Told
from tandem_operator.controller.facts import Parts
from tandem_operator.controller.findings import Findings
from tandem_operator.controller.kinds import POD, WORKER_POOL
from tandem_operator.controller.objects import Seen
from tandem_operator.planning.observed import Canary
from tandem_operator.planning.scaling_config import scaling_config
from tandem_operator.telemetry.autoscaler import Autoscaler, Scaled
from tandem_operator.telemetry.decisions import event_of, remembered, worth_telling
from tandem_operator.telemetry.flips import Flip, order_flip
from tandem_operator.telemetry.looks import Seen as PodsSeen
from tandem_operator.telemetry.orders import OrderFailedError
from tandem_operator.telemetry.pods import DELETION_COST, PodSeen
from tandem_operator.telemetry.reading import LoadReader

logger = logging.getLogger(__name__)

SendCanary = Callable[[Ask, str], Awaitable[Canary]]
"""Sends one, with the service's token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The service as a turn finds it."""

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

    def _old(self, revision: str | None) -> bool:
        return revision != self.status.revision


@dataclass(slots=True)
class Lookout:
    """One per service, for as long as this operator leads."""

    client: httpx.AsyncClient
    cluster: Cluster
    events: EventPoster
    token: Callable[[Served], Awaitable[str]]
    """The service's token for orders. Raises `OrderFailedError` while there is none."""
    send_canary: SendCanary | None
    """None: canaries are switched off."""
    book: CanaryBook
    clock: Callable[[], float] = time.monotonic
    autoscaler: Autoscaler = field(default_factory=Autoscaler)
    reader: LoadReader = field(init=False)
    seen: PodsSeen | None = None
    """What the pods said last."""

    def __post_init__(self) -> None:
        self.reader = LoadReader(client=self.client, now=self.clock)

    async def turn(self, subject: Subject, before: Findings) -> Findings:
        """Raises `ApiError` when the API server does not take the outcome."""
        seen = await self.reader.read(subject.pods)
        self.seen = seen
        canaries = await self._canaries(subject)
        holding, decisions = before.holding, before.decisions
        if subject.wanted.spec.autoscaling.mode == "internal":
            scaled = self._decide(subject, seen)
            if scaled is not None:
                known = list(decisions) if decisions is not None else subject.status.decisions
                await self._tell(subject, known, scaled)
                decisions = tuple(remembered(known, scaled.decisions, subject.now))
                holding = steady(holding, scaled.holding)
                await self._scale(subject, scaled)
        return Findings(canaries=canaries, links=seen.slow_links(), decisions=decisions, holding=holding)

    async def _canaries(self, subject: Subject) -> dict[str, Canary]:
        if self.send_canary is None:
            return {}
        for ask in self.book.due(self.clock(), subject.pods):
            self.book.take(self.clock(), ask, await self._ask(subject, ask, self.send_canary))
        revisions = [one.revision for one in subject.parts.deployments() if one.revision]
        return self.book.results(self.clock(), revisions)

    async def _ask(self, subject: Subject, ask: Ask, send: SendCanary) -> Canary:
        try:
            return await send(ask, await self.token(subject.wanted))
        except OrderFailedError as error:
            return Canary(passed=False, message=str(error))

    def _decide(self, subject: Subject, seen: PodsSeen) -> Scaled | None:
        pools = subject.parts.pools()
        if len(pools) < len(ROLES):
            return None
        return self.autoscaler.step(
            seen,
            scaling_config(subject.wanted),
            subject.pods,
            pools,
            revision=subject.status.revision,
            rolling_out=subject.rolling_out,
        )

    async def _tell(self, subject: Subject, known: Sequence[Decision], scaled: Scaled) -> None:
        for decision in worth_telling(known, scaled.decisions):
            kind, reason, message = event_of(decision)
            logger.info("%s: %s: %s", subject.service.key, reason, message)
            await self.events.post(subject.service, Told("Warning" if kind == "Warning" else "Normal", reason, message))

    async def _scale(self, subject: Subject, scaled: Scaled) -> None:
        namespace = subject.service.namespace
        await annotate_costs(self.cluster, namespace, scaled.costs.items())
        for flip in scaled.flips:
            await self._flip(subject, flip)
        pools = subject.parts.pools()
        for role in ROLES:
            if scaled.pools[role] != pools[role]:
                ref = WORKER_POOL.ref(pool_name(subject.service.ref.name, role))
                await self.cluster.scale(ref, namespace, scaled.pools[role])

    async def _flip(self, subject: Subject, flip: Flip) -> None:
        try:
            await order_flip(self.client, flip, await self.token(subject.wanted))
        except OrderFailedError as error:
            # The next look shows that it serves as before, and decides anew.
            logger.warning("%s: %s did not become %s: %s", subject.service.key, flip.pod.name, flip.role, error)


async def annotate_costs(cluster: Cluster, namespace: str, costs: Iterable[tuple[str, int]]) -> None:
    """Which pods go first when their number shrinks: the cheapest."""
    for name, cost in costs:
        body = {"metadata": {"annotations": {DELETION_COST: str(cost)}}}
        try:
            await cluster.merge(POD.ref(name), namespace, body)
        except ApiError as error:
            # Gone meanwhile: it costs nothing any more.
            if not error.absent:
                raise
