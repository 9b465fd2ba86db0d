"""Sends canary requests through new revisions, workers and gateways, and ends the standby of workers that pass.

    pods ─▶ which are on standby ─▶ due canaries ─▶ results ─▶ POST /offer to workers through which one passed
                                                           ─▶ pods become Ready, the rollout continues
    before the canary of a single worker: POST /hold, so that it does not offer itself in the meantime

`RevisionCanaries` and `PodCanaries` are pure: the caller provides time and results. `CanaryRunner` sends the requests.

    revision   through its first pair until one passes: then both workers are offered to the router, and from then on
               their readiness counts
    worker     each other worker of a revision that passed (added, replaced, restarted), before it is offered; with a
               serving partner of the other role if there is one
    gateway    repeatedly; fails after several failures in a row, so that one lost packet is no outage

    on standby ─▶ canary ─┬─ passed ─▶ proven, until it is offered
                          └─ failed ─▶ again after `RETRY_S` with the next partner, which may have been at fault

If canaries through the gateway fail as well, the new worker is not at fault: after `BAD_IN_A_ROW` failures it counts as
proven, since it is no worse than those that serve. A worker without a partner gets no canary and offers itself
(`tandem_services.worker.standby`).

The operator keeps no state: workers report whether they are on standby, and the API server has the revisions. A new
leader reads both and sends the canary again, at the cost of one request.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import httpx

from tandem_operator.builders.served import Served
from tandem_operator.controller.observations import Subject
from tandem_operator.planning.observed import Canary
from tandem_operator.planning.status import GATEWAY_CANARY
from tandem_operator.telemetry.pods import PodSeen
from tandem_operator.telemetry.worker_control import (
    ModelAt,
    OrderFailedError,
    order_hold,
    order_offer,
    pair_of,
    starting,
    with_standby,
)

RETRY_S = 5.0
BAD_IN_A_ROW = 3

AT_ONCE = 8
"""New workers that are tested at once: they share a gateway, and partners that serve clients."""


@dataclass(frozen=True, slots=True)
class _Tried:
    sent_at: float = -math.inf
    bad: int = 0
    message: str = ""


@dataclass(slots=True)
class PodCanaries:
    """Canaries of the new workers of one service. Times are monotonic seconds; keys are uids of pods."""

    _tried: dict[str, _Tried] = field(default_factory=dict)
    _passed: set[str] = field(default_factory=set)

    def due(self, now: float, usable: Iterable[PodSeen], passed: Collection[str]) -> list[tuple[PodSeen, PodSeen]]:
        """New workers of the revisions `passed` to test now, each with its partner; those that waited longest first."""
        known = sorted(usable, key=lambda pod: pod.name)
        candidates = [pod for pod in known if pod.standby and pod.worker_role and pod.revision in passed]
        due = [pod for pod in candidates if pod.uid not in self._passed and now - self._of(pod).sent_at >= RETRY_S]
        due.sort(key=lambda pod: self._of(pod).sent_at)
        partners = ((pod, self._partner(pod, known)) for pod in due)
        return [(pod, partner) for pod, partner in partners if partner is not None][:AT_ONCE]

    def take(self, now: float, pod: PodSeen, answer: Canary, *, serving: bool) -> None:
        """Records the result of a canary. `serving`: canaries through the gateway pass."""
        if answer.passed:
            self.mark_passed(pod)
            return
        bad = self._of(pod).bad + 1
        self._tried[pod.uid] = _Tried(now, bad, answer.message)
        if bad >= BAD_IN_A_ROW and not serving:
            self.mark_passed(pod)

    def mark_passed(self, *pods: PodSeen) -> None:
        """Marks the pods that a canary has passed."""
        self._passed |= {pod.uid for pod in pods if pod.standby}

    def has_passed(self, pod: PodSeen) -> bool:
        return pod.uid in self._passed

    def offered(self, pod: PodSeen) -> None:
        """The pod has left standby. If it is on standby again, it is another process and gets a new canary."""
        self._passed.discard(pod.uid)
        self._tried.pop(pod.uid, None)

    def failing(self, pods: Iterable[PodSeen]) -> Mapping[str, str]:
        """Names of pods that are not offered, with the reason. Forgets pods that no longer exist."""
        living = {pod.uid: pod for pod in pods}
        self._tried = {uid: tried for uid, tried in self._tried.items() if uid in living}
        self._passed &= living.keys()
        return {
            living[uid].name: tried.message
            for uid, tried in self._tried.items()
            if tried.bad >= BAD_IN_A_ROW and uid not in self._passed and not living[uid].ready
        }

    def _partner(self, pod: PodSeen, usable: Sequence[PodSeen]) -> PodSeen | None:
        """The next partner after each failure: one that serves, or else one on standby."""
        others = [one for one in usable if one.worker_role not in (None, pod.role) and one.revision == pod.revision]
        chosen = [one for one in others if not one.standby] or others
        return chosen[self._of(pod).bad % len(chosen)] if chosen else None

    def _of(self, pod: PodSeen) -> _Tried:
        return self._tried.get(pod.uid, _Tried())


REPEAT_S = 30.0
"""Seconds between two canaries through the gateway while they pass."""


@dataclass(frozen=True, slots=True)
class CanaryRequest:
    """A canary to send."""

    revision: str
    """`GATEWAY_CANARY` if the gateway chooses the workers."""
    gateway: PodSeen
    pair: tuple[PodSeen, PodSeen] | None = None
    """The prefill and the decode worker of the canary."""
    candidate: PodSeen | None = None
    """The worker of the pair that is tested, if its revision has passed before."""
    model: ModelAt | None = None
    """For a gateway that has several."""

    @property
    def key(self) -> str:
        """The subject of the canary: one such canary at a time."""
        return self.revision if self.candidate is None else f"pod {self.candidate.uid}"


@dataclass(frozen=True, slots=True)
class _Entry:
    canary: Canary | None = None
    sent_at: float | None = None
    bad: int = 0


@dataclass(slots=True)
class RevisionCanaries:
    """Canaries of the revisions and the gateway of one service. Times are monotonic seconds."""

    timeout_s: float
    """A revision without a result this long after it was first seen has failed."""
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _first_seen: dict[str, float] = field(default_factory=dict)
    _pods: PodCanaries = field(default_factory=PodCanaries)

    def due(self, now: float, pods: Iterable[PodSeen]) -> list[CanaryRequest]:
        """The canaries to send now."""
        usable = [pod for pod in pods if pod.usable]
        gateway = next((pod for pod in usable if pod.role == "gateway"), None)
        if gateway is None:
            return []
        revisions = dict.fromkeys(pod.revision for pod in usable if pod.worker_role is not None)
        pairs = {revision: pair for revision in revisions if (pair := pair_of(revision, usable)) is not None}
        asks = [CanaryRequest(revision, gateway, pair) for revision, pair in pairs.items() if self._due(now, revision)]
        # Workers that the router may choose: none, while all pairs are on standby.
        offered = any(not pod.standby for pair in pairs.values() for pod in pair)
        if offered and self._due(now, GATEWAY_CANARY):
            asks.append(CanaryRequest(GATEWAY_CANARY, gateway))
        passed = {name for name, entry in self._entries.items() if entry.canary is not None and entry.canary.passed}
        for pod, partner in self._pods.due(now, usable, passed):
            pair = (pod, partner) if pod.role == "prefill" else (partner, pod)
            asks.append(CanaryRequest(pod.revision, gateway, pair, candidate=pod))
        return asks

    def take(self, now: float, ask: CanaryRequest, answer: Canary) -> None:
        """Records the result of a canary."""
        if ask.candidate is not None:
            gateway = self._entries.get(GATEWAY_CANARY)
            self._pods.take(now, ask.candidate, answer, serving=gateway is None or not gateway.bad)
            return
        if answer.passed and ask.pair is not None:
            self._pods.mark_passed(*ask.pair)
        before = self._entries.get(ask.revision, _Entry())
        if answer.unserved and before.canary is None:
            # A gateway of several services learns of a new one only after a while.
            self._entries[ask.revision] = replace(before, sent_at=now)
            return
        bad = 0 if answer.passed else before.bad + 1
        tolerated = before.canary is not None and before.canary.passed and bad < BAD_IN_A_ROW
        canary = before.canary if tolerated else _steady(before.canary, answer)
        self._entries[ask.revision] = _Entry(canary, now, bad)

    def forget_gateway(self) -> None:
        """The gateways are others now: nothing is known of them."""
        self._entries.pop(GATEWAY_CANARY, None)

    def has_passed(self, pod: PodSeen) -> bool:
        """Whether a canary has passed through the pod since it is on standby."""
        return self._pods.has_passed(pod)

    def offered(self, pod: PodSeen) -> None:
        """The pod has left standby."""
        self._pods.offered(pod)

    def failing(self, pods: Iterable[PodSeen]) -> Mapping[str, str]:
        """Names of workers that fail although their revision has passed, with the reason. `pods`: all pods."""
        return self._pods.failing(pods)

    def results(self, now: float, revisions: Iterable[str]) -> dict[str, Canary]:
        """Results of the revisions that have workers, and of the gateway."""
        living = {*revisions, GATEWAY_CANARY}
        self._entries = {name: entry for name, entry in self._entries.items() if name in living}
        self._first_seen = {name: self._first_seen.get(name, now) for name in living}
        results = {name: entry.canary for name, entry in self._entries.items() if entry.canary is not None}
        for name in living - {GATEWAY_CANARY} - set(results):
            if now - self._first_seen[name] > self.timeout_s:
                results[name] = Canary(
                    passed=False, message=f"no pair of the revision responded within {self.timeout_s:.0f} s"
                )
        return results

    def _due(self, now: float, revision: str) -> bool:
        entry = self._entries.get(revision)
        if entry is None or entry.sent_at is None:
            return True
        if entry.canary is not None and entry.canary.passed and not entry.bad:
            return revision == GATEWAY_CANARY and now - entry.sent_at >= REPEAT_S
        return now - entry.sent_at >= RETRY_S


def _steady(before: Canary | None, now: Canary) -> Canary:
    """`now`, with the message of `before` if only numbers differ: otherwise each canary would write a status."""
    if before is None or before.passed != now.passed:
        return now
    return replace(now, message=steady(before.message, now.message))


def steady(before: str, now: str) -> str:
    """`before`, if `now` differs only in its numbers."""
    return before if _words(before) == _words(now) else now


def _words(text: str) -> str:
    return "".join(letter for letter in text if not letter.isdigit() and letter != ".")


logger = logging.getLogger(__name__)

SendCanary = Callable[[CanaryRequest, str], Awaitable[Canary]]
"""Sends a canary with the token of the gateway."""


@dataclass(slots=True)
class CanaryRunner:
    """Sends the canaries of one service, while this operator leads."""

    client: httpx.AsyncClient
    token: Callable[[Served], Awaitable[str]]
    """The control token of the service, or of its ModelGateway. Raises `OrderFailedError` while there is none."""
    send: SendCanary | None
    """None: canaries are switched off, and no worker is on standby."""
    book: RevisionCanaries
    clock: Callable[[], float] = time.monotonic
    asking: dict[str, tuple[CanaryRequest, "asyncio.Task[Canary]"]] = field(default_factory=dict)
    """Canaries under way, by `CanaryRequest.key`."""
    via: tuple[str, ModelAt | None] = ("", None)
    """ModelGateway, and the model there, of the last canaries."""
    expecting: bool = False
    """A worker starts, or a result is pending: the next poll should be soon."""
    failing: dict[str, str] = field(default_factory=dict)
    """Pods that are not routable because canaries through them fail, although their revision has passed."""

    async def run_due(self, subject: Subject, *, timeout_s: float | None) -> dict[str, Canary]:
        """The results of each revision, and of the gateway under "". Waits at most `timeout_s` for results; None: for
        all of them.
        """
        if self.send is None:
            return {}
        self._follow_gateway(subject)
        pods = await with_standby(self.client, subject.pods)
        canaries = await self._canaries(subject, pods, self.send, timeout_s)
        await self._offer(subject, pods)
        failing = self.book.failing(pods)
        self.failing = {name: steady(self.failing.get(name, text), text) for name, text in failing.items()}
        self.expecting = bool(self.asking) or bool(starting(pods))
        return canaries

    def close(self) -> None:
        """Cancels canaries in flight."""
        for _, answer in self.asking.values():
            answer.cancel()

    def _follow_gateway(self, subject: Subject) -> None:
        """Canaries may go through gateways of another owner now, or name another model."""
        reference = subject.wanted.spec.gateway_ref
        via = ("" if reference is None else reference.name, subject.model)
        if via == self.via:
            return
        self.via = via
        self.book.forget_gateway()
        if (pending := self.asking.pop(GATEWAY_CANARY, None)) is not None:
            pending[1].cancel()

    async def _canaries(
        self, subject: Subject, pods: Sequence[PodSeen], send: SendCanary, timeout_s: float | None
    ) -> dict[str, Canary]:
        """Sends due canaries, in addition to those in flight."""
        for ask in self.book.due(self.clock(), pods):
            if ask.key not in self.asking:
                self.asking[ask.key] = (ask, asyncio.create_task(self._ask(subject, ask, send)))
        if self.asking:
            await asyncio.wait([answer for _, answer in self.asking.values()], timeout=timeout_s)
        for key, (ask, answer) in list(self.asking.items()):
            if answer.done():
                self.book.take(self.clock(), ask, answer.result())
                del self.asking[key]
        revisions = [one.revision for one in subject.parts.deployments() if one.revision]
        return self.book.results(self.clock(), revisions)

    async def _ask(self, subject: Subject, ask: CanaryRequest, send: SendCanary) -> Canary:
        try:
            token = await self.token(subject.wanted)
            if ask.candidate is not None:
                await order_hold(self.client, ask.candidate, token)
            if subject.gateway is not None:
                token = await self.token(subject.gateway)
            return await send(replace(ask, model=subject.model), token)
        except OrderFailedError as error:
            return Canary(passed=False, message=str(error))

    async def _offer(self, subject: Subject, pods: Sequence[PodSeen]) -> None:
        """Ends the standby of pods that passed a canary, and of pods without a possible partner."""
        passed = [pod for pod in pods if pod.standby and (self.book.has_passed(pod) or not subject.has_pairs)]
        await asyncio.gather(*(self._offer_one(subject, pod) for pod in passed))

    async def _offer_one(self, subject: Subject, pod: PodSeen) -> None:
        try:
            await order_offer(self.client, pod, await self.token(subject.wanted))
        except OrderFailedError as error:
            # It stays on standby, and the next poll detects that.
            logger.warning("cannot make pod routable for %s: %s: %s", subject.service.key, pod.name, error)
        else:
            self.book.offered(pod)
            logger.info("pod is routable for %s: %s", subject.service.key, pod.name)
