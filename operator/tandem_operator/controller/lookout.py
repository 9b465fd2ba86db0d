"""Looks after one service beyond its objects, one turn each period: asks its pods, and acts on what they say.

pods ─▶ figures ─▶ links slower than expected
                ─▶ the autoscaler (mode internal): costs of pods, then flips, then replicas of pools
     ─▶ canaries that are due
                                                    all of it ─▶ Findings, which reconciles read
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import httpx

from tandem_operator.api.model_service import Decision, ModelServiceStatus
from tandem_operator.api.roles import ROLES
from tandem_operator.builders.naming import pool_name
from tandem_operator.builders.served import Served
from tandem_operator.controller.canaries import Ask, CanaryBook, steady
from tandem_operator.controller.carry_out import Executor
from tandem_operator.controller.events import EventPoster, Told
from tandem_operator.controller.facts import Parts
from tandem_operator.controller.findings import Findings
from tandem_operator.controller.kinds import WORKER_POOL
from tandem_operator.controller.objects import Seen
from tandem_operator.planning.observed import Canary
from tandem_operator.planning.scaling_config import scaling_config
from tandem_operator.telemetry.autoscaler import Autoscaler, Scaled
from tandem_operator.telemetry.decisions import event_of, remembered, worth_telling
from tandem_operator.telemetry.flips import Flip, order_flip
from tandem_operator.telemetry.looks import Seen as PodsSeen
from tandem_operator.telemetry.orders import OrderFailedError
from tandem_operator.telemetry.pods import PodSeen
from tandem_operator.telemetry.reading import LoadReader

logger = logging.getLogger(__name__)

QUICK_S = 1.0
"""A canary that is answered so soon counts in the same turn."""

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
    executor: Executor
    events: EventPoster
    token: Callable[[Served], Awaitable[str]]
    """The service's token for orders. Raises `OrderFailedError` while there is none."""
    send_canary: SendCanary | None
    """None: canaries are switched off."""
    book: CanaryBook
    clock: Callable[[], float] = time.monotonic
    autoscaler: Autoscaler = field(default_factory=Autoscaler)
    reader: LoadReader = field(init=False)
    asking: dict[str, tuple[Ask, "asyncio.Task[Canary]"]] = field(default_factory=dict)
    """Canaries under way, by revision."""
    look_at: float = -math.inf
    """When figures are read again."""

    def __post_init__(self) -> None:
        self.reader = LoadReader(client=self.client, now=self.clock)

    async def ask(self, subject: Subject, before: Findings | None) -> Findings:
        """Send the canaries that are due. `before`: None the first time, which waits for the answers, for nothing is
        planned without them; later nobody waits for slow ones.
        """
        canaries = await self._canaries(subject, patience_s=None if before is None else QUICK_S)
        return replace(before or Findings(), canaries=canaries)

    async def look(self, subject: Subject, known: Findings) -> Findings:
        """Read figures, if it is time to, and act on them. Raises `ApiError` when the API server does not take the
        outcome.
        """
        if self.clock() < self.look_at:
            return known
        self.look_at = self.clock() + subject.wanted.spec.autoscaling.period_seconds
        seen = await self.reader.read(subject.pods)
        found = replace(known, links=seen.slow_links(), pods=seen)
        scaled = self._decide(subject, seen)
        if scaled is None:
            return replace(found, holding="")
        decisions = list(known.decisions) if known.decisions is not None else subject.status.decisions
        await self._tell(subject, decisions, scaled)
        await self._scale(subject, scaled)
        told = tuple(remembered(decisions, scaled.decisions, subject.now))
        return replace(found, decisions=told, holding=steady(known.holding, scaled.holding))

    async def _canaries(self, subject: Subject, *, patience_s: float | None) -> dict[str, Canary]:
        """Send those that are due, beside those under way."""
        if self.send_canary is None:
            return {}
        for ask in self.book.due(self.clock(), subject.pods):
            if ask.revision not in self.asking:
                answer = asyncio.create_task(self._ask(subject, ask, self.send_canary))
                self.asking[ask.revision] = (ask, answer)
        if self.asking:
            await asyncio.wait([answer for _, answer in self.asking.values()], timeout=patience_s)
        for revision, (ask, answer) in list(self.asking.items()):
            if answer.done():
                self.book.take(self.clock(), ask, answer.result())
                del self.asking[revision]
        revisions = [one.revision for one in subject.parts.deployments() if one.revision]
        return self.book.results(self.clock(), revisions)

    def close(self) -> None:
        """Canaries under way are given up."""
        for _, answer in self.asking.values():
            answer.cancel()

    async def _ask(self, subject: Subject, ask: Ask, send: SendCanary) -> Canary:
        try:
            return await send(ask, await self.token(subject.wanted))
        except OrderFailedError as error:
            return Canary(passed=False, message=str(error))

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
            logger.warning("%s: %s did not become %s: %s", subject.service.key, flip.pod.name, flip.role, error)
