"""A router over several cells: the gateway's own one first, then others.

    1. own cell      decides as a gateway without cells does. Its choice is taken if the worker has capacity and its
                     Redis answers
    2. other cells   otherwise those that seem to have room are asked, at most `MAX_ASKED`: in the order of a hash of
                     the beginning of the prompt, so that prompts with one prefix meet. The first choice with capacity
                     is taken; of a prompt that waits for others alone, if it costs no more than that with what is
                     cached here
    3. none          the choice of the own cell stands: the request waits in the gateway's queue as without cells, or
                     is routed by the last view while Redis is away. Summaries of full cells are read again, so that
                     one with capacity is asked when the queue tries the request the next time

Each attempt begins with the own cell, so requests return to it as soon as it has capacity. KV moves within a cell
alone: a stream that loses its worker is computed again where it continues, as after the death of any worker.

Sessions, quarantine, fairness, usage and registered adapters are those of the own cell.
"""

import asyncio
import logging
from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from random import Random

from tandem_engine.base.clock import Clock, MonotonicClock
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.common.tasks import BackgroundTasks, run_periodically
from tandem_services.router.cells.neighbour_cell import KEPT, OPEN_WAIT_S, NeighbourCell
from tandem_services.router.cells.places import CellPlace
from tandem_services.router.cells.proofs import CellProofs, SharedProofs
from tandem_services.router.decision import (
    MemberProofs,
    NoWorkersError,
    Placement,
    RouteDecision,
    RouteQuery,
    Source,
    WorkerView,
)
from tandem_services.router.keys import HEARTBEAT_S
from tandem_services.router.membership import FleetView
from tandem_services.router.redis_functions import LibrarySource, library_source
from tandem_services.router.registry import Endings, WorkerState
from tandem_services.router.router import RETRY_AFTER_S, Router, RouterConfig
from tandem_services.router.scoring import has_to_wait, prefill_wait_s
from tandem_services.router.starting import StartingWorker

logger = logging.getLogger(__name__)

MAX_ASKED = 2
"""Other cells that one decision asks."""

ORDER_TOKENS = 256
"""Prompts that begin with so many equal tokens go to the same other cell."""

FULL = "full"
"""Reason of a request that another cell serves because the chosen worker of the own one has no capacity now."""

START_WAIT_S = 5.0
"""A gateway starts without the Redis of its own cell after this long, if another cell answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CellFigures:
    """Another cell as it is."""

    name: str
    reachable: bool
    prefill_workers: int
    decode_workers: int
    awake: bool
    """Whether its view is open."""


class CellRouter:
    """As `Router`, for a gateway with other cells. All methods belong to one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        others: Sequence[CellPlace],
        *,
        model: str,
        worker_wait_s: float,
        needs_prefill: bool = False,
        clock: Clock | None = None,
        random: Random | None = None,
        source: LibrarySource | None = None,
        begin: Callable[[Router], Awaitable[None]] = Router.start,
        open_wait_s: float = OPEN_WAIT_S,
    ) -> None:
        """`worker_wait_s`: a prompt that would wait longer for other prompts is sent to another cell. `needs_prefill`:
        so is one that a decode worker would compute for want of others. `begin`, `open_wait_s`: see
        `NeighbourCell`."""
        clock, random = clock or MonotonicClock(), random or Random()
        source = source or library_source()
        start_timeout_s = min(config.start_timeout_s, START_WAIT_S)
        self.home = Router(replace(config, start_timeout_s=start_timeout_s), clock=clock, random=random, source=source)
        self.sessions, self.quarantine, self.usage = self.home.sessions, self.home.quarantine, self.home.usage
        self.fairness, self.adapters = self.home.fairness, self.home.adapters
        self.end_reports = self
        self.counters = self.home.counters
        """Those of the own cell."""
        self._name, self._model = config.cluster, model
        self._worker_wait_s, self._needs_prefill = worker_wait_s, needs_prefill
        self._proofs = SharedProofs()
        self._others = [
            NeighbourCell(
                place=place,
                config=config,
                proofs=self._proofs,
                clock=clock,
                random=random,
                source=source,
                begin=begin,
                open_wait_s=open_wait_s,
            )
            for place in others
        ]
        self._by_name = {cell.name: cell for cell in self._others}
        self._background = BackgroundTasks()
        self._looking: asyncio.Task[None] | None = None
        self._workers = _Joined()
        self._offered = _Joined()

    async def start(self) -> None:
        """Raises `RedisUnavailableError` when no cell has a Redis that can be used."""
        try:
            await self.home.start()
        except RedisUnavailableError as error:
            opened = await asyncio.gather(*(cell.open(within_s=START_WAIT_S) for cell in self._others))
            if not any(opened):
                raise
            logger.warning("cell %s has no Redis, requests go to others: %s", self._name, error)
            self.home.begin()
        await self.look()
        self._looking = asyncio.create_task(self._keep_looking(), name="cells")

    async def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._background.settle()
        await asyncio.gather(self.home.stop(), *(cell.close() for cell in self._others))

    async def choose(self, query: RouteQuery) -> RouteDecision:
        """As `Router.choose`, in the own cell or in another one."""
        if query.only is not None:
            return await self._choose_among(query, query.only)
        reserved: list[RouteDecision] = []
        try:
            return await self._choose(query, reserved)
        except BaseException:
            for decision in reserved:
                self._background.start(self.release(decision))
            raise

    async def redeem(self, ticket_id: str, query: RouteQuery) -> RouteDecision | None:
        """As `Router.redeem`: tickets are of the own cell."""
        return await self.home.redeem(ticket_id, query)

    async def stay(self, query: RouteQuery, incarnation: str) -> RouteDecision:
        """As `Router.stay`, in whatever cell this worker is."""
        cell = self._cell_of(incarnation)
        if cell is not None:
            return await cell.stay(query, incarnation)
        try:
            return await self.home.stay(query, incarnation)
        except NoWorkersError:
            if self.home.knows(incarnation):
                raise
            # It may be in a cell that is asleep.
            await asyncio.gather(*(each.open() for each in self._others if each.reachable))
            cell = self._cell_of(incarnation)
            if cell is None:
                raise
        return await cell.stay(query, incarnation)

    async def relocate(self, query: RouteQuery, leaving: WorkerView) -> RouteDecision:
        """As `Router.relocate`: within the cell of `leaving`, because KV moves only there."""
        cell = self._cell_of(leaving.incarnation)
        if cell is not None:
            return await cell.relocate(query, leaving)
        if not self.home.knows(leaving.incarnation):
            raise NoWorkersError(f"worker {leaving.incarnation} is in no view", retry_after=RETRY_AFTER_S)
        return await self.home.relocate(query, leaving)

    async def release(self, decision: RouteDecision) -> None:
        """As `Router.release`."""
        if decision.cell is None:
            await self.home.release(decision)
        else:
            await self._by_name[decision.cell.name].release(decision)

    def release_soon(self, decision: RouteDecision) -> None:
        """As `Router.release_soon`."""
        if decision.cell is None:
            self.home.release_soon(decision)
        else:
            self._by_name[decision.cell.name].release_soon(decision)

    async def endings(self, incarnations: Iterable[str]) -> Endings:
        """As `Registry.endings`, of workers of all cells that are in use. Raises `RedisUnavailableError` if no cell
        answers."""
        names = tuple(incarnations)
        asked = (router.end_reports.endings(names) for router in self.in_use())
        found = await asyncio.gather(*asked, return_exceptions=True)
        known = [each for each in found if isinstance(each, Endings)]
        for error in found:
            if isinstance(error, BaseException) and (not known or not isinstance(error, RedisUnavailableError)):
                raise error
        return Endings(
            ended=frozenset().union(*(each.ended for each in known)),
            for_memory=frozenset().union(*(each.for_memory for each in known)),
        )

    def figures(self) -> list[CellFigures]:
        """The other cells as they are."""
        return [
            CellFigures(
                name=cell.name,
                reachable=cell.reachable,
                prefill_workers=cell.summary.prefill.workers,
                decode_workers=cell.summary.decode.workers,
                awake=cell.router is not None,
            )
            for cell in self._others
        ]

    def workers(self) -> tuple[WorkerView, ...]:
        """As `Router.workers`, of all cells that are in use."""
        return self._workers.of([router.workers() for router in self.in_use()])

    def peers(self, worker: WorkerView) -> tuple[WorkerView, ...]:
        """As `Router.peers`: those of its cell."""
        return self._router_of(worker.incarnation).workers()

    def offered(self) -> tuple[WorkerView, ...]:
        """As `Router.offered`, of all cells that are in use."""
        return self._offered.of([router.offered() for router in self.in_use()])

    def ready(self) -> tuple[WorkerView, ...]:
        """As `Router.ready`: of the own cell, or of others while it has none. A model changes in one cell at a time,
        and the tokenizer of a gateway is that of its own."""
        return self.home.ready() or tuple(view for router in self.in_use() for view in router.ready())

    def starting(self) -> tuple[StartingWorker, ...]:
        """As `Router.starting`, of the own cell."""
        return self.home.starting()

    def prefill_rate(self, model: str) -> float:
        """As `Router.prefill_rate`: of the own cell, or of others while it has none."""
        return self.home.prefill_rate(model) or sum(router.prefill_rate(model) for router in self.in_use())

    def fleet(self) -> FleetView:
        """As `Router.fleet`, of the own cell."""
        return self.home.fleet()

    def require_encoding(self, digest: str) -> None:
        """As `Router.require_encoding`, in all cells."""
        self.home.require_encoding(digest)
        for cell in self._others:
            cell.require_encoding(digest)

    def rely_on(self, proofs: MemberProofs) -> None:
        """As `Router.rely_on`, in all cells."""
        self._proofs.pool = proofs
        self.home.rely_on(CellProofs(self._proofs, proofs, self._name))
        for cell in self._others:
            if cell.router is not None:
                cell.router.rely_on(CellProofs(self._proofs, proofs, cell.name))

    def mark_dead(self, incarnation: str) -> None:
        """As `Router.mark_dead`."""
        self._router_of(incarnation).mark_dead(incarnation)

    def mark_alive(self, incarnation: str) -> None:
        """As `Router.mark_alive`."""
        self._router_of(incarnation).mark_alive(incarnation)

    def note_refusal(self, incarnation: str, state: WorkerState) -> None:
        """As `Router.note_refusal`."""
        self._router_of(incarnation).note_refusal(incarnation, state)

    def in_use(self) -> Iterator[Router]:
        """Routers of the own cell and of those whose view is open."""
        yield self.home
        for cell in self._others:
            if cell.router is not None:
                yield cell.router

    async def look(self) -> None:
        """Read the summaries of other cells, and close views that are not used. Called once a second."""
        await asyncio.gather(*(cell.look(self._model) for cell in self._others))
        if not self.home.redis_answers or not self.home.offered():
            # The next request need not wait for a view.
            for cell in [cell for cell in self._others if cell.summary.has_room][:MAX_ASKED]:
                cell.wake()
        for cell in self._others:
            await cell.sleep_when_idle()

    async def _choose(self, query: RouteQuery, reserved: list[RouteDecision]) -> RouteDecision:
        """`reserved`: choices that are to be released if this is cancelled."""
        lacking: NoWorkersError | None = None
        try:
            reserved.append(await self.home.choose(query))
        except NoWorkersError as error:
            lacking, reason = error, "no_worker"
        else:
            reason = self._fault(reserved[0])
        if not reason:
            return reserved[0]
        # It has a place, and waits for the prompts of a worker that may have more of its own cached than another cell
        # computes meanwhile.
        waits = reserved[0] if reason == FULL and not has_to_wait(reserved[0].terms) else None
        for cell in self._in_order(query):
            other = await cell.choose(query, reason=reason)
            if other is None:
                continue
            reserved.append(other)
            fault = self._fault(other)
            if not fault and (waits is None or _price(other) <= _price(waits)):
                await self._release_all_but(other, reserved)
                return other
            if fault:
                cell.pass_over(len(query.token_ids))
            await self._release_all_but(reserved[0], reserved)
        full = [cell for cell in self._others if cell.is_worth_a_look and self._suits(cell)]
        await self._look_again(_ordered(query, full)[:MAX_ASKED])
        if not reserved:
            assert lacking is not None
            raise lacking
        return reserved[0]

    async def _choose_among(self, query: RouteQuery, names: frozenset[str]) -> RouteDecision:
        """One of these, which are of one cell: no other one has them."""
        cell = next((found for name in sorted(names) if (found := self._cell_of(name)) is not None), None)
        if cell is None:
            return await self.home.choose(query)
        decision = await cell.choose(query, reason=KEPT)
        if decision is None:
            raise NoWorkersError(f"cell {cell.name} has lost these workers", retry_after=RETRY_AFTER_S)
        return decision

    async def _release_all_but(self, kept: RouteDecision, reserved: list[RouteDecision]) -> None:
        for decision in [each for each in reserved if each is not kept]:
            await self.release(decision)
            reserved.remove(decision)

    def _fault(self, decision: RouteDecision) -> str:
        """Why another cell is asked although one has made this choice; "" if none is."""
        if decision.cell is None and decision.source is Source.LOCAL and not self.home.redis_answers:
            return "no_redis"
        if self._needs_prefill and decision.placement is Placement.DEGRADED:
            return "no_worker"
        waits = has_to_wait(decision.terms) or prefill_wait_s(decision.terms) > self._worker_wait_s
        return FULL if waits else ""

    def _in_order(self, query: RouteQuery) -> list[NeighbourCell]:
        able = [cell for cell in self._others if cell.may_take(len(query.token_ids)) and self._suits(cell)]
        return _ordered(query, able)[:MAX_ASKED]

    async def _look_again(self, cells: Sequence[NeighbourCell]) -> None:
        """At what they have, without waiting for it."""
        # Async for the router of a simulation, which overrides it and waits for them: its tasks end in no fixed order.
        for cell in cells:
            self._background.start(cell.look(self._model))

    def _suits(self, cell: NeighbourCell) -> bool:
        return not self._needs_prefill or cell.summary.prefill.workers > 0

    def _cell_of(self, incarnation: str) -> NeighbourCell | None:
        """None: the own one, or one that is asleep."""
        if self.home.knows(incarnation):
            return None
        return next((cell for cell in self._others if cell.knows(incarnation)), None)

    def _router_of(self, incarnation: str) -> Router:
        cell = self._cell_of(incarnation)
        return self.home if cell is None or cell.router is None else cell.router

    async def _keep_looking(self) -> None:
        failure = "cannot read the summaries of other cells"
        await run_periodically(self.look, every_s=HEARTBEAT_S, logger=logger, failure=failure)


def _price(decision: RouteDecision) -> float:
    return sum(term.seconds for term in decision.terms)


def _ordered(query: RouteQuery, cells: list[NeighbourCell]) -> list[NeighbourCell]:
    """By a hash of the beginning of the prompt."""
    if len(cells) < 2:
        return cells
    beginning = blake2b(array("q", query.token_ids[:ORDER_TOKENS]).tobytes(), digest_size=8)
    beginning.update(query.cache_salt.encode("utf-8", "surrogatepass"))
    prompt = beginning.digest()
    return sorted(cells, key=lambda cell: blake2b(cell.name.encode(), key=prompt, digest_size=8).digest())


class _Joined:
    """Tuples of several routers as one, which is the same object while they are: each request reads it."""

    def __init__(self) -> None:
        self._parts: list[tuple[WorkerView, ...]] = []
        self._whole: tuple[WorkerView, ...] = ()

    def of(self, parts: list[tuple[WorkerView, ...]]) -> tuple[WorkerView, ...]:
        if len(parts) == 1:
            return parts[0]
        same = len(parts) == len(self._parts) and all(map(_is, parts, self._parts))
        if not same:
            self._parts, self._whole = parts, tuple(view for part in parts for view in part)
        return self._whole


def _is(one: object, other: object) -> bool:
    return one is other
