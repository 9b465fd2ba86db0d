"""Tries what is new of one service: canaries, and the end of the standby of workers that one has gone through.

    pods ─▶ who of them stands by ─▶ canaries that are due ─▶ answers ─▶ POST /offer to those through which one passed
                                                                    ─▶ pods turn Ready, rollouts go on
    before the canary of a single worker: POST /hold, else it would help itself in the meantime

The state is where it belongs: whether a worker stands by is the worker's, which revisions there are the API server's.
A new leader asks both and sends the canary again; it costs a request.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import httpx

from tandem_operator.builders.served import Served
from tandem_operator.controller.canaries import Ask, CanaryBook, steady
from tandem_operator.controller.subject import Subject
from tandem_operator.planning.observed import Canary
from tandem_operator.telemetry.orders import OrderFailedError
from tandem_operator.telemetry.pods import PodSeen
from tandem_operator.telemetry.standby import order_hold, order_offer, starting, with_standby

logger = logging.getLogger(__name__)

SendCanary = Callable[[Ask, str], Awaitable[Canary]]
"""Sends one, with the service's token."""


@dataclass(slots=True)
class Trials:
    """One per service, for as long as this operator leads."""

    client: httpx.AsyncClient
    token: Callable[[Served], Awaitable[str]]
    """The service's token for orders. Raises `OrderFailedError` while there is none."""
    send: SendCanary | None
    """None: canaries are switched off, and no worker stands by."""
    book: CanaryBook
    clock: Callable[[], float] = time.monotonic
    asking: dict[str, tuple[Ask, "asyncio.Task[Canary]"]] = field(default_factory=dict)
    """Canaries under way, by `Ask.key`."""
    expecting: bool = False
    """A worker starts, or an answer is due: the next turn should be soon."""
    failing: dict[str, str] = field(default_factory=dict)
    """Pods that are kept from the router because canaries through them fail, though their revision has passed."""

    async def turn(self, subject: Subject, *, patience_s: float | None) -> dict[str, Canary]:
        """What is known of each revision, and of the gateway under "". Waits no longer than `patience_s` for answers;
        None: for all of them.
        """
        if self.send is None:
            return {}
        pods = await with_standby(self.client, subject.pods)
        canaries = await self._canaries(subject, pods, self.send, patience_s)
        await self._offer(subject, pods)
        failing = self.book.failing(pods)
        self.failing = {name: steady(self.failing.get(name, text), text) for name, text in failing.items()}
        self.expecting = bool(self.asking) or bool(starting(pods))
        return canaries

    def close(self) -> None:
        """Canaries under way are given up."""
        for _, answer in self.asking.values():
            answer.cancel()

    async def _canaries(
        self, subject: Subject, pods: Sequence[PodSeen], send: SendCanary, patience_s: float | None
    ) -> dict[str, Canary]:
        """Send those that are due, beside those under way."""
        for ask in self.book.due(self.clock(), pods):
            if ask.key not in self.asking:
                self.asking[ask.key] = (ask, asyncio.create_task(self._ask(subject, ask, send)))
        if self.asking:
            await asyncio.wait([answer for _, answer in self.asking.values()], timeout=patience_s)
        for key, (ask, answer) in list(self.asking.items()):
            if answer.done():
                self.book.take(self.clock(), ask, answer.result())
                del self.asking[key]
        revisions = [one.revision for one in subject.parts.deployments() if one.revision]
        return self.book.results(self.clock(), revisions)

    async def _ask(self, subject: Subject, ask: Ask, send: SendCanary) -> Canary:
        try:
            token = await self.token(subject.wanted)
            if ask.newcomer is not None:
                await order_hold(self.client, ask.newcomer, token)
            return await send(ask, token)
        except OrderFailedError as error:
            return Canary(passed=False, message=str(error))

    async def _offer(self, subject: Subject, pods: Sequence[PodSeen]) -> None:
        """End the standby of all that a canary has gone through, and of those that have nobody to be tried with."""
        proved = [pod for pod in pods if pod.standby and (self.book.proved(pod) or not subject.has_pairs)]
        await asyncio.gather(*(self._offer_one(subject, pod) for pod in proved))

    async def _offer_one(self, subject: Subject, pod: PodSeen) -> None:
        try:
            await order_offer(self.client, pod, await self.token(subject.wanted))
        except OrderFailedError as error:
            # It stands by, and the next turn finds it so.
            logger.warning("cannot make pod routable for %s: %s: %s", subject.service.key, pod.name, error)
        else:
            self.book.offered(pod)
            logger.info("pod is routable for %s: %s", subject.service.key, pod.name)
