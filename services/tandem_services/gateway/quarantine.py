"""Requests that kill workers are refused before they have killed all of them [poison-quarantined].

    convicted    workers were lost because of it (`suspicion`): it is answered by a 500
    remembered   for `QUARANTINE_S`, by every gateway: requests that ask for the same are refused at once
    forgotten    when the time is over, or when an operator clears it (`tandem quarantine`)

What is remembered is a keyed digest of prompt and parameters. The seed is no part of it: gateways draw one when a
client names none. Redis carries the digests from gateway to gateway; without it each remembers its own.
"""

import logging
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from tandem_engine.clock import Clock
from tandem_engine.messages.pooling import PoolingParams
from tandem_engine.messages.sampling import SamplingParams
from tandem_services.common.errors import ApiError
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.common.tasks import for_ever
from tandem_services.gateway.metrics import GatewayMetrics
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
