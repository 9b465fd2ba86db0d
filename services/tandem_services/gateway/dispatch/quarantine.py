"""Rejects requests that crash workers before they have crashed all of them [poison-quarantined].

`Suspects` finds the request at fault among all that a lost worker was running:

    free         no worker was lost with it, or it has cleared itself since
    suspected    a worker was lost before the request had cleared itself there: it is retried at once, as all others
    isolated     a second one was lost, and others were on the first: it is retried when no other such retry runs
    at fault     two workers were lost, and no other uncleared request was on the first of them; or three were lost

A worker that the kernel killed because memory was short counts for no request: memory ran out for all of them. Only its
parent process can read the cause, and reports it as it deregisters (`EndReports`). In a container that the kernel kills
as a whole, no process is left to report it, so the worker counts.

A crash affects many requests that did not cause it. A request that crashes workers does so again soon, while its prompt
or its next tokens are computed. A request therefore clears itself on a worker with `PROOF_TOKENS` new tokens. A worker
counts only if it is known to have received the request, so that of two simultaneous crashes the second is not
attributed to a request that was just sent there.

`Quarantine` keeps the result:

    at fault      the request fails with a 500
    remembered    for `QUARANTINE_S`, by every gateway: equal requests are rejected at once
    forgotten     after that time, or when an operator clears it (`tandem quarantine`)

It stores a keyed digest of prompt and parameters. The digest excludes the seed, since gateways draw one when a client
sets none. Redis shares the digests; without it each gateway uses its own.
"""

import asyncio
import contextlib
import logging
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from tandem_engine.base.clock import Clock
from tandem_services.common.errors import ApiError
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.common.tasks import run_periodically
from tandem_services.gateway.dispatch.plan import Choice, RequestPlan
from tandem_services.gateway.observe.metrics import GatewayMetrics
from tandem_services.router.keys import HEARTBEAT_S
from tandem_services.router.registry import Endings

logger = logging.getLogger(__name__)
QUARANTINE_S = 600.0

REPORT_S, REPORT_POLL_S = 1.0, 0.1
"""From the end of an engine until its parent has deregistered it: two polls and one call of Redis."""

MAX_REMEMBERED = 1024
"""Digests; the oldest makes room for the next."""


class Board(Protocol):
    """Digests that all gateways share. Methods raise `RedisUnavailableError`; see `QuarantineBoard`."""

    async def put(self, digest: str, *, ttl_s: float, capacity: int) -> None: ...

    async def digests(self) -> dict[str, float]:
        """Digest → seconds left."""
        ...


class EndReports(Protocol):
    """How workers have ended. Raises `RedisUnavailableError`; see `Registry.endings`."""

    async def endings(self, incarnations: Iterable[str]) -> Endings: ...


@dataclass(kw_only=True, slots=True)
class Quarantine:
    """What this gateway refuses. One per model service; belongs to its event loop."""

    model: str
    """Its name among the workers."""
    clock: Clock
    metrics: GatewayMetrics
    salt: bytes
    """At most 64 bytes, of the deployment: the digest does not reveal the prompt, and all gateways compute the same."""
    board: Board | None = None
    reports: EndReports | None = None
    """None: how a worker ended is not known, so each loss counts."""
    _expires: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Digest → monotonic time, the oldest first."""
    _unpublished: set[str] = field(default_factory=set)

    def check(self, plan: RequestPlan, choice: Choice) -> None:
        """Raises `ApiError` 500 for a request that is remembered."""
        if not self._expires:
            return
        expires = self._expires.get(self._digest(plan, choice))
        if expires is not None and self.clock.now() < expires:
            self.metrics.quarantine_refusals.inc()
            raise quarantined()

    async def killed_for_memory(self, lost: Collection[str]) -> frozenset[str]:
        """Those of the lost workers that the kernel killed because memory was short. Their parents need a moment to
        report it: waits `REPORT_S` at most, while some have not reported how they ended."""
        if self.reports is None:
            return frozenset()
        killed: frozenset[str] = frozenset()
        with contextlib.suppress(RedisUnavailableError):
            for _ in range(round(REPORT_S / REPORT_POLL_S)):
                endings = await self.reports.endings(lost)
                killed = endings.for_memory
                if endings.ended.issuperset(lost):
                    break
                await asyncio.sleep(REPORT_POLL_S)
        return killed

    def quarantine(self, plan: RequestPlan, choice: Choice, *, about: dict[str, Any], workers: Collection[str]) -> None:
        """Remember the request, here now and everywhere else soon. `about`: fields of its log records."""
        digest = self._digest(plan, choice)
        self._unpublished.add(digest)
        self._remember(digest, QUARANTINE_S)
        self.metrics.convictions.inc()
        fields = {**about, "workers": sorted(workers), "digest": digest, "seconds": QUARANTINE_S}
        logger.error("request quarantined: workers that ran it were lost", extra={"fields": fields})

    async def run(self) -> None:
        """Stay synchronized with the other gateways until canceled."""
        # What other gateways know would otherwise never be learned again.
        failure = "cannot synchronize the quarantine"
        await run_periodically(self.sync, every_s=HEARTBEAT_S, logger=logger, failure=failure, at_once=True)

    async def sync(self) -> None:
        """Publish what is new here, and take over what is known elsewhere. Redis away: next time."""
        self._drop_expired()
        if self.board is None:
            return
        try:
            for digest in [*self._unpublished]:
                await self.board.put(digest, ttl_s=QUARANTINE_S, capacity=MAX_REMEMBERED)
                self._unpublished.discard(digest)
            known = await self.board.digests()
        except RedisUnavailableError:
            return
        for cleared in self._expires.keys() - known.keys() - self._unpublished:
            del self._expires[cleared]
        for digest, seconds in known.items():
            self._remember(digest, min(seconds, QUARANTINE_S))

    def _remember(self, digest: str, seconds: float) -> None:
        self._expires[digest] = self.clock.now() + seconds
        while len(self._expires) > MAX_REMEMBERED:
            self._unpublished.discard(self._expires.popitem(last=False)[0])
        self.metrics.quarantined.set(len(self._expires))

    def _drop_expired(self) -> None:
        now = self.clock.now()
        for digest in [digest for digest, expires in self._expires.items() if now >= expires]:
            del self._expires[digest]
            self._unpublished.discard(digest)
        self.metrics.quarantined.set(len(self._expires))

    def _digest(self, plan: RequestPlan, choice: Choice) -> str:
        """Of all that can kill a worker."""
        parameters = msgspec.structs.replace(choice.sampling, seed=0)
        digest = blake2b(
            msgspec.msgpack.encode((self.model, parameters, plan.pooling)),
            key=self.salt,
            digest_size=16,
            salt=b"" if plan.adapter is None else plan.adapter.digest,
        )
        digest.update(array("q", choice.input_ids).tobytes())
        return digest.hexdigest()


def quarantined() -> ApiError:
    """500: the same request would kill the next worker as well."""
    return ApiError(
        500,
        "Model workers failed each time they computed this request, so it is rejected. Change the request, or ask an "
        "administrator: logs have the cause under the request id.",
        kind="InternalServerError",
        reason="request_quarantined",
    )


PROOF_TOKENS = 4
"""New tokens on one worker that prove a request harmless there."""

POISON_LOSSES = 2

CERTAIN_LOSSES = 3
"""Whatever other requests were on the lost workers."""

TRIAL_S = 5.0
"""A trial that takes longer, because its worker is busy, holds up no other."""

MAX_WORKERS = 256
"""Workers of which suspects are remembered. A lost one is never used again."""


@dataclass(kw_only=True, slots=True)
class Suspicion:
    """Workers that were lost with one choice in hand, since it last proved itself."""

    lost: dict[str, bool] = field(default_factory=dict)
    """In order of loss: whether other requests were possible causes too."""

    def note_loss(self, incarnation: str, *, gained: int, alone: bool) -> None:
        """`gained`: tokens that the lost worker had brought. `alone`: no other unproven request was there."""
        if gained >= PROOF_TOKENS:
            self.proved()
            return
        self.lost.setdefault(incarnation, not alone)

    def proved(self) -> None:
        """It has got through where workers were lost."""
        self.lost.clear()

    def clear_losses(self, others: Iterable[str]) -> None:
        """Workers that were lost for another reason: those that are there again did not die, it was the network."""
        for incarnation in others:
            self.lost.pop(incarnation, None)

    @property
    def is_poison(self) -> bool:
        first_with_others = next(iter(self.lost.values()), False)
        return len(self.lost) >= (CERTAIN_LOSSES if first_with_others else POISON_LOSSES)

    @property
    def needs_trial(self) -> bool:
        return len(self.lost) >= POISON_LOSSES


@dataclass(kw_only=True, slots=True)
class Suspects:
    """Requests that are on workers and have not proved themselves there. One per model service."""

    _unproven: OrderedDict[str, set[str]] = field(default_factory=OrderedDict)
    """Names of attempts by incarnation. Those of a lost worker stay, to be counted by each of them."""
    _trial_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def enter(self, suspicion: Suspicion, rid: str, workers: Iterable[str]) -> "Trial":
        """Before attempt `rid` is sent to `workers`. An isolated request waits for its turn."""
        trial = Trial(suspects=self, rid=rid, workers=tuple(workers))
        if suspicion.needs_trial:
            await self._trial_lock.acquire()
            trial.hold_lock(self._trial_lock)
        for worker in trial.workers:
            unproven = self._unproven.get(worker)
            if unproven is None:
                unproven = self._unproven[worker] = set()
                if len(self._unproven) > MAX_WORKERS:
                    self._unproven.popitem(last=False)
            unproven.add(rid)
        return trial

    def alone(self, worker: str) -> bool:
        """Whether at most one unproven request was on `worker`."""
        return len(self._unproven.get(worker, ())) <= 1

    def leave(self, rid: str, workers: Iterable[str]) -> None:
        for worker in workers:
            attempts = self._unproven.get(worker, set())
            attempts.discard(rid)
            if not attempts:
                self._unproven.pop(worker, None)


@dataclass(kw_only=True, slots=True)
class Trial:
    """A request on its way to prove itself."""

    suspects: Suspects
    rid: str
    workers: tuple[str, ...]
    _trial_lock: asyncio.Lock | None = None
    _limit: asyncio.TimerHandle | None = None

    def hold_lock(self, lock: asyncio.Lock) -> None:
        """It runs as the only isolated request, for a limited time."""
        self._trial_lock = lock
        self._limit = asyncio.get_running_loop().call_later(TRIAL_S, self._rise)

    def cleared(self) -> None:
        """It has proved itself, or ended in some other way than with its worker. Idempotent."""
        self.suspects.leave(self.rid, self.workers)
        self._rise()

    def lost(self, worker: str) -> None:
        """`worker` died; if it had another one, that one lives."""
        self.suspects.leave(self.rid, (other for other in self.workers if other != worker))
        self._rise()

    def _rise(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
        if self._trial_lock is not None:
            self._trial_lock.release()
        self._trial_lock = self._limit = None
