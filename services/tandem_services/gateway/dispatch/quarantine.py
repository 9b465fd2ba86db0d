"""Requests that kill workers are refused before they have killed all of them [poison-quarantined].

    convicted    workers were lost because of it (`suspicion`): it is answered by a 500
    remembered   for `QUARANTINE_S`, by every gateway: requests that ask for the same are refused at once
    forgotten    when the time is over, or when an operator clears it (`tandem quarantine`)

What is remembered is a keyed digest of prompt and parameters. The seed is no part of it: gateways draw one when a
client names none. Redis carries the digests from gateway to gateway; without it each remembers its own.

Who of all that a lost worker had in hand is to blame for it.

    free         a request that no worker was lost with, or that has proved itself since
    suspected    a worker was lost before the request had proved itself there: it goes on at once, like all others
    on trial     a second one was lost, and others were on the first: it goes on when no other trial is under way
    convicted    two workers were lost, and no other unproven request was on the first of them; or three

A worker dies with many requests in hand, and most of them are innocent. What kills a worker does it again, and soon:
while its prompt or its next tokens are computed. So a request proves itself on a worker by `PROOF_TOKENS` new tokens,
and a loss after that clears it. A worker counts only when it is known to have taken the request in: when two die at
once, nobody who was just sent to the second is blamed for it.
"""

import asyncio
import logging
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from tandem_engine.base.clock import Clock
from tandem_engine.messages.requests import PoolingParams
from tandem_engine.messages.sampling import SamplingParams
from tandem_services.common.errors import ApiError
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.common.tasks import for_ever
from tandem_services.gateway.observe.metrics import GatewayMetrics
from tandem_services.router.keys import HEARTBEAT_S

logger = logging.getLogger(__name__)
QUARANTINE_S = 600.0

MAX_REMEMBERED = 1024
"""Digests; the oldest makes room for the next."""


class Asked(Protocol):
    """What of a request can kill a worker."""

    @property
    def model(self) -> str: ...

    @property
    def input_ids(self) -> tuple[int, ...]: ...

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def pooling(self) -> PoolingParams | None: ...


class Board(Protocol):
    """Digests that all gateways share. Methods raise `RedisUnavailableError`; see `QuarantineBoard`."""

    async def put(self, digest: str, *, ttl_s: float, capacity: int) -> None: ...

    async def digests(self) -> dict[str, float]:
        """Digest → seconds left."""
        ...


@dataclass(kw_only=True, slots=True)
class Quarantine:
    """What this gateway refuses. One per model service; belongs to its event loop."""

    clock: Clock
    metrics: GatewayMetrics
    salt: bytes
    """At most 64 bytes, of the deployment: nobody can tell a prompt from its digest, and all gateways agree."""
    board: Board | None = None
    _expires: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Digest → monotonic time, the oldest first."""
    _unpublished: set[str] = field(default_factory=set)

    def check(self, request: Asked) -> None:
        """Raises `ApiError` 500 for a request that is remembered."""
        if not self._expires:
            return
        expires = self._expires.get(self._digest(request))
        if expires is not None and self.clock.now() < expires:
            self.metrics.quarantine_refusals.inc()
            raise quarantined()

    def convict(self, request: Asked, *, about: dict[str, Any], workers: set[str]) -> None:
        """Remember `request`, here now and everywhere else soon. `about`: fields of its log records."""
        digest = self._digest(request)
        self._unpublished.add(digest)
        self._remember(digest, QUARANTINE_S)
        self.metrics.convictions.inc()
        fields = {**about, "workers": sorted(workers), "digest": digest, "seconds": QUARANTINE_S}
        logger.error("request quarantined: workers that ran it were lost", extra={"fields": fields})

    async def run(self) -> None:
        """Keep in step with the other gateways, for ever."""
        # What other gateways know would otherwise never be learned again.
        complaint = "cannot synchronize the quarantine"
        await for_ever(self.sync, every_s=HEARTBEAT_S, logger=logger, complaint=complaint, at_once=True)

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

    def _digest(self, request: Asked) -> str:
        parameters = msgspec.structs.replace(request.sampling, seed=0)
        digest = blake2b(
            msgspec.msgpack.encode((request.model, parameters, request.pooling)), key=self.salt, digest_size=16
        )
        digest.update(array("q", request.input_ids).tobytes())
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

CONVICTING_LOSSES = 2

CERTAIN_LOSSES = 3
"""Whoever else was there."""

TRIAL_S = 5.0
"""A trial that takes longer, because its worker is busy, holds up no other."""

MAX_WORKERS = 256
"""Workers of which suspects are remembered. One that is gone is never asked for again."""


@dataclass(kw_only=True, slots=True)
class Suspicion:
    """Workers that were lost with one choice in hand, since it last proved itself."""

    lost: set[str] = field(default_factory=set)
    with_others: bool = False
    """For the first of them other requests were possible causes too."""

    def note_loss(self, incarnation: str, *, gained: int, alone: bool) -> None:
        """`gained`: tokens that the lost worker had brought. `alone`: no other unproven request was there."""
        if gained >= PROOF_TOKENS:
            self.proved()
            return
        if not self.lost:
            self.with_others = not alone
        self.lost.add(incarnation)

    def proved(self) -> None:
        """It has got through where workers were lost."""
        self.lost.clear()
        self.with_others = False

    def acquit(self, living: Iterable[str]) -> None:
        """Workers that were lost and are there again did not die: it was the network."""
        self.lost.difference_update(living)
        if not self.lost:
            self.with_others = False

    @property
    def convicted(self) -> bool:
        return len(self.lost) >= (CERTAIN_LOSSES if self.with_others else CONVICTING_LOSSES)

    @property
    def needs_trial(self) -> bool:
        return len(self.lost) >= CONVICTING_LOSSES


@dataclass(kw_only=True, slots=True)
class Suspects:
    """Requests that are on workers and have not proved themselves there. One per model service."""

    _unproven: OrderedDict[str, set[str]] = field(default_factory=OrderedDict)
    """Names of attempts by incarnation. Those of a lost worker stay, to be counted by each of them."""
    _court: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def enter(self, suspicion: Suspicion, rid: str, workers: Iterable[str]) -> "Trial":
        """Before attempt `rid` is sent to `workers`. Who is on trial waits for its turn."""
        trial = Trial(suspects=self, rid=rid, workers=tuple(workers))
        if suspicion.needs_trial:
            await self._court.acquire()
            trial.in_court(self._court)
        for worker in trial.workers:
            self._unproven.setdefault(worker, set()).add(rid)
        while len(self._unproven) > MAX_WORKERS:
            self._unproven.popitem(last=False)
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
    _court: asyncio.Lock | None = None
    _limit: asyncio.TimerHandle | None = None

    def in_court(self, court: asyncio.Lock) -> None:
        """It has the court to itself, for a while."""
        self._court = court
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
        if self._court is not None:
            self._court.release()
        self._court = self._limit = None
