"""Another cell, as a gateway knows it: a summary once a second, and a router of its own while requests go there.

    asleep    only the summary is read: how many workers serve the model, and what one more request would cost
    opening   the first request that may go there starts a router, which reads the view of the whole cell
    awake     the router is used as that of the own cell is; it is closed `IDLE_S` after its last request

So a gateway has the view of its own cell alone, unless that one fails. A summary only decides whether a cell is
asked; what a request is sent to is decided by signed rows, as in the own cell.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from math import inf
from random import Random
from typing import Annotated

import msgspec

from tandem_engine.base.clock import Clock
from tandem_engine.base.errors import ConfigError
from tandem_services.common.redis_client import BACKGROUND_TIMEOUT_S, RarelyLogged, RedisClient, RedisUnavailableError
from tandem_services.router.cells.places import CellPlace
from tandem_services.router.cells.proofs import CellProofs, SharedProofs
from tandem_services.router.cost import NO_ROOM_S
from tandem_services.router.decision import NoWorkersError, OtherCell, RouteDecision, RouteQuery, WorkerView
from tandem_services.router.keys import MAX_WORKERS, Keys
from tandem_services.router.redis_functions import FunctionLibrary, LibrarySource
from tandem_services.router.registry import model_digest
from tandem_services.router.router import Router, RouterConfig

logger = logging.getLogger(__name__)

SUMMARY_S = 3.0
"""A summary counts for this long: one may be lost and one late before a cell is no longer asked."""

OPEN_WAIT_S = 0.25
"""A request waits this long for the view of a cell that was asleep; the next one finds it open."""

PASSED_OVER_S = 0.25
"""A cell without capacity is not asked again for this long, whatever its summary says, for a prompt that is no
shorter."""

IDLE_S = 60.0
"""The view of a cell is kept this long after its last request."""

KEPT = "kept"
"""Reason of a request that is in another cell because what it continues, or another choice of its prompt, is there."""


class RoleSummary(msgspec.Struct, frozen=True):
    """Workers that compute prompts, or those that generate."""

    workers: Annotated[int, msgspec.Meta(ge=0, le=MAX_WORKERS)]
    seconds: Annotated[float, msgspec.Meta(ge=0.0)]
    """What a request would cost at the cheapest of them, more than `NO_ROOM_S` where it would have to wait."""


class CellSummary(msgspec.Struct, frozen=True):
    """Of one model."""

    prefill: RoleSummary
    decode: RoleSummary

    @property
    def has_room(self) -> bool:
        """Whether a sequence need not wait there, as far as ranks tell."""
        return self.decode.workers > 0 and self.decode.seconds < NO_ROOM_S


NO_SUMMARY = CellSummary(RoleSummary(0, 0.0), RoleSummary(0, 0.0))


@dataclass(kw_only=True, slots=True)
class NeighbourCell:
    """Belongs to the event loop of its `CellRouter`."""

    place: CellPlace
    config: RouterConfig
    """Of the gateway's own cell: all but name and Redis are the same."""
    proofs: SharedProofs
    clock: Clock
    random: Random
    source: LibrarySource
    begin: Callable[[Router], Awaitable[None]] = Router.start
    """Opens its view, which is renewed from then on. Raises `RedisUnavailableError`."""
    open_wait_s: float = OPEN_WAIT_S
    encoding: str = ""
    """See `Router.require_encoding`."""
    router: Router | None = None
    """None while it is asleep."""
    _summary: CellSummary = NO_SUMMARY
    _seen_at: float = -inf
    _looked_at: float = -inf
    _library: FunctionLibrary | None = None
    _opening: "asyncio.Task[None] | None" = None
    _held: set[int] = field(default_factory=set)
    """Serials of choices that are in use."""
    _used_at: float = -inf
    _passed_over_until: float = -inf
    _passed_over_tokens: int = 0
    """Of the shortest prompt that it had no capacity for."""
    _log: RarelyLogged = field(init=False)

    def __post_init__(self) -> None:
        self._log = RarelyLogged(clock=self.clock)

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def summary(self) -> CellSummary:
        """Without workers while its Redis does not answer."""
        return self._summary if self.reachable else NO_SUMMARY

    @property
    def reachable(self) -> bool:
        """Whether its Redis has answered lately."""
        return self.clock.now() - self._seen_at < SUMMARY_S

    def may_take(self, prompt_tokens: int) -> bool:
        """Whether it is worth asking for a prompt of this length."""
        is_passed_over = prompt_tokens >= self._passed_over_tokens and self.clock.now() < self._passed_over_until
        return self.summary.has_room and not is_passed_over

    @property
    def is_worth_a_look(self) -> bool:
        """Whether it is full, as far as a summary tells that is no longer new: a place may be free by now."""
        looked_s = self.clock.now() - self._looked_at
        return self.reachable and not self.summary.has_room and looked_s >= PASSED_OVER_S

    async def look(self, model: str) -> None:
        """Read the summary. Called once a second, and while requests wait for it to have room."""
        self._looked_at = self.clock.now()
        keys = Keys(self.name, self.config.deployment.namespace)
        try:
            if self._library is None:
                client = RedisClient(self.place.address(), timeout_s=BACKGROUND_TIMEOUT_S)
                self._library = FunctionLibrary(client, self.source)
            self._summary = await self._library.ask(
                "cell_summary", keys.shared, keys.prefix, model_digest(model), shape=CellSummary
            )
        except ConfigError as error:
            self._log.warning(f"cannot reach cell {self.name}: {error}")
        except RedisUnavailableError:
            # Its client logs it once a minute.
            return
        else:
            self._seen_at = self.clock.now()

    async def choose(self, query: RouteQuery, *, reason: str) -> RouteDecision | None:
        """Reserved there; None when it has no workers for it now, which says nothing about other requests."""
        router = await self.open()
        if router is None:
            return None
        try:
            decision = await router.choose(query)
        except NoWorkersError:
            return None
        return self._taken(decision, reason)

    async def stay(self, query: RouteQuery, incarnation: str) -> RouteDecision:
        """See `Router.stay`."""
        router = await self.open()
        if router is None:
            raise NoWorkersError(f"cell {self.name} cannot be reached", retry_after=OPEN_WAIT_S)
        return self._taken(await router.stay(query, incarnation), KEPT)

    async def relocate(self, query: RouteQuery, leaving: WorkerView) -> RouteDecision:
        """See `Router.relocate`. Only of a worker that it `knows`."""
        assert self.router is not None, "a cell that is asleep has no requests"
        return self._taken(await self.router.relocate(query, leaving), KEPT)

    async def release(self, decision: RouteDecision) -> None:
        """See `Router.release`."""
        self._held.discard(decision.reservation.serial)
        if self.router is not None:
            await self.router.release(decision)

    def release_soon(self, decision: RouteDecision) -> None:
        """See `Router.release_soon`."""
        self._held.discard(decision.reservation.serial)
        if self.router is not None:
            self.router.release_soon(decision)

    def pass_over(self, prompt_tokens: int) -> None:
        """It had no capacity just now for a prompt of this length."""
        now = self.clock.now()
        shortest = self._passed_over_tokens if now < self._passed_over_until else prompt_tokens
        self._passed_over_tokens = min(shortest, prompt_tokens)
        self._passed_over_until = now + PASSED_OVER_S

    def knows(self, incarnation: str) -> bool:
        """Whether it is awake and has this worker."""
        return self.router is not None and self.router.knows(incarnation)

    async def open(self, *, within_s: float | None = None) -> Router | None:
        """Its router; None where it does not answer in this time, `open_wait_s` by default, after which it continues
        to open."""
        self.wake()
        if self.router is None:
            assert self._opening is not None
            await asyncio.wait({self._opening}, timeout=self.open_wait_s if within_s is None else within_s)
        return self.router

    def wake(self) -> None:
        """Begin to open it, if it is asleep. It is kept as after a request."""
        self._used_at = self.clock.now()
        if self.router is None and self._opening is None:
            self._opening = asyncio.create_task(self._open(), name=f"open cell {self.name}")
            self._opening.add_done_callback(self._opened)

    def require_encoding(self, digest: str) -> None:
        """See `Router.require_encoding`."""
        self.encoding = digest
        if self.router is not None:
            self.router.require_encoding(digest)

    async def sleep_when_idle(self) -> None:
        """Close the view if no request has used it lately."""
        router = self.router
        if router is not None and not self._held and self.clock.now() - self._used_at >= IDLE_S:
            self.router = None
            self.proofs.forget(self.name)
            await router.stop()
            logger.info("closed the view of a cell", extra={"fields": {"cell": self.name}})

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self.router is not None:
            await self.router.stop()
        if self._library is not None:
            await self._library.client.close()

    async def _open(self) -> None:
        try:
            address = self.place.address()
        except ConfigError as error:
            self._log.warning(f"cannot reach cell {self.name}: {error}")
            return
        config = replace(self.config, redis=address, cluster=self.name, start_timeout_s=0.0)
        router = Router(config, clock=self.clock, random=self.random, source=self.source)
        if self.encoding:
            router.require_encoding(self.encoding)
        if self.proofs.pool is not None:
            router.rely_on(CellProofs(self.proofs, self.proofs.pool, self.name))
        async with AsyncExitStack() as opened:
            opened.push_async_callback(router.stop)
            try:
                await self.begin(router)
            except RedisUnavailableError as error:
                self._log.warning(f"cannot reach cell {self.name}: {error}")
                return
            opened.pop_all()
        self._used_at, self.router = self.clock.now(), router
        logger.info("opened the view of a cell", extra={"fields": {"cell": self.name}})

    def _opened(self, task: "asyncio.Task[None]") -> None:
        self._opening = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("cannot open the view of a cell", exc_info=error, extra={"fields": {"cell": self.name}})

    def _taken(self, decision: RouteDecision, reason: str) -> RouteDecision:
        self._used_at = self.clock.now()
        self._held.add(decision.reservation.serial)
        return replace(decision, cell=OtherCell(self.name, reason))
