"""Looks after one service beyond its objects, one turn each period: asks its pods, and acts on what they say.

pods ─▶ canaries that are due ─▶ workers on standby whose revision has passed are offered to the router
     ─▶ figures ─▶ links slower than expected
                ─▶ the autoscaler (mode internal): costs of pods, then flips, then replicas of pools
                                                    all of it ─▶ Findings, which reconciles read
"""

import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import httpx

from tandem_operator.api.model_service import Decision
from tandem_operator.api.roles import ROLES
from tandem_operator.builders.naming import pool_name
from tandem_operator.builders.served import Served
from tandem_operator.controller.canaries import steady
from tandem_operator.controller.carry_out import Executor
from tandem_operator.controller.events import EventPoster, Told
from tandem_operator.controller.findings import Findings
from tandem_operator.controller.kinds import WORKER_POOL, ServiceKey
from tandem_operator.controller.subject import Subject
from tandem_operator.controller.trials import Trials
from tandem_operator.planning.scaling_config import scaling_config
from tandem_operator.telemetry.autoscaler import Autoscaler, Scaled
from tandem_operator.telemetry.decisions import event_of, remembered, worth_telling
from tandem_operator.telemetry.flips import Flip, order_flip
from tandem_operator.telemetry.looks import Seen as PodsSeen
from tandem_operator.telemetry.orders import OrderFailedError
from tandem_operator.telemetry.reading import LoadReader

logger = logging.getLogger(__name__)

QUICK_S = 1.0
"""A canary that is answered so soon counts in the same turn."""


@dataclass(slots=True)
class Lookout:
    """One per service, for as long as this operator leads."""

    client: httpx.AsyncClient
    executor: Executor
    events: EventPoster
    token: Callable[[Served], Awaitable[str]]
    """The service's token for orders. Raises `OrderFailedError` while there is none."""
    trials: Trials
    external: Callable[[ServiceKey], PodsSeen | None] = lambda _: None
    """What was seen of a service that others scale: its pods are asked elsewhere (`external_looks`)."""
    clock: Callable[[], float] = time.monotonic
    autoscaler: Autoscaler = field(default_factory=Autoscaler)
    reader: LoadReader = field(init=False)
    look_at: float = -math.inf
    """When figures are read again."""

    def __post_init__(self) -> None:
        self.reader = LoadReader(client=self.client, now=self.clock)

    async def ask(self, subject: Subject, before: Findings | None) -> Findings:
        """Send the canaries that are due. `before`: None the first time, which waits for the answers, for nothing is
        planned without them; later nobody waits for slow ones.
        """
        canaries = await self.trials.turn(subject, patience_s=None if before is None else QUICK_S)
        return replace(before or Findings(), canaries=canaries, failing=self.trials.failing)

    async def look(self, subject: Subject, known: Findings) -> Findings:
        """Read figures, if it is time to, and act on them. Raises `ApiError` when the API server does not take the
        outcome.
        """
        if self.clock() < self.look_at:
            return known
        self.look_at = self.clock() + subject.wanted.spec.autoscaling.period_seconds
        seen = await self._seen(subject)
        if seen is None:
            return known
        found = replace(known, links=seen.slow_links(), pods=seen)
        scaled = self._decide(subject, seen)
        if scaled is None:
            return replace(found, holding="")
        decisions = list(known.decisions) if known.decisions is not None else subject.status.decisions
        await self._tell(subject, decisions, scaled)
        await self._scale(subject, scaled)
        told = tuple(remembered(decisions, scaled.decisions, subject.now))
        return replace(found, decisions=told, holding=steady(known.holding, scaled.holding))

    @property
    def expecting(self) -> bool:
        """Whether the next turn should be soon."""
        return self.trials.expecting

    async def _seen(self, subject: Subject) -> PodsSeen | None:
        if subject.wanted.spec.autoscaling.mode == "external":
            return self.external(subject.service.key)
        return await self.reader.read(subject.pods)

    def close(self) -> None:
        """Canaries under way are given up."""
        self.trials.close()

    def _decide(self, subject: Subject, seen: PodsSeen) -> Scaled | None:
        pools = subject.parts.pools()
        if subject.wanted.spec.autoscaling.mode != "internal" or len(pools) < len(ROLES):
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
        await self.executor.annotate_costs(namespace, scaled.costs)
        for flip in scaled.flips:
            await self._flip(subject, flip)
        pools = subject.parts.pools()
        for role in ROLES:
            if scaled.pools[role] != pools[role]:
                ref = WORKER_POOL.ref(pool_name(subject.service.ref.name, role))
                await self.executor.scale(ref, namespace, scaled.pools[role])

    async def _flip(self, subject: Subject, flip: Flip) -> None:
        try:
            await order_flip(self.client, flip, await self.token(subject.wanted))
        except OrderFailedError as error:
            # The next look shows that it serves as before, and decides anew.
            logger.warning(
                "role flip failed for %s: pod %s to %s: %s", subject.service.key, flip.pod.name, flip.role, error
            )
