"""Chooses workers for requests: the only entry point of the router for a gateway.

1. `start` requires Redis once, loads the function library and reads the first view of the fleet.
2. A background task refreshes the view every heartbeat.
3. `choose` hashes the prompt, queries Redis in one round trip, and resolves the reply in the view. If Redis is
   unavailable, slow or returns malformed data, the last view is used [redis-is-optional]. No request fails because of
   Redis, and none waits for it longer than the routing deadline. If Redis does not list some of the members, their
   share of the requests is routed by the view.
4. `release` frees the reservation when an attempt has ended, however it ended.

`ExplainBudget` limits how many decisions record the options they chose from. That costs Redis, router and journal some
microseconds and bytes each, which matters at thousands of decisions per second. In a busy second only the first ones
are recorded.
"""

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random

from tandem_engine.base.clock import Clock, MonotonicClock
from tandem_engine.config import Role
from tandem_services.common.redis_client import (
    BACKGROUND_TIMEOUT_S,
    ROUTING_TIMEOUT_S,
    BreakerState,
    RedisAddress,
    RedisClient,
    RedisUnavailableError,
)
from tandem_services.common.tasks import run_periodically
from tandem_services.router.adapter_prices import AdapterPrices
from tandem_services.router.cost import Demand, room_needed
from tandem_services.router.decision import (
    Claim,
    MemberProofs,
    NoWorkersError,
    Placement,
    Reservation,
    RouteDecision,
    RouteQuery,
    Source,
    WorkerView,
)
from tandem_services.router.deployment import Deployment
from tandem_services.router.in_flight import PromptsInFlight
from tandem_services.router.index import BlockIndex, LastChain
from tandem_services.router.keys import HEARTBEAT_S, Keys
from tandem_services.router.local_choices import FewWorkers, LocalChoices, LocalRouting, OwnLoad
from tandem_services.router.membership import KEEPER_WAIT_S, FleetView, Membership
from tandem_services.router.policies import PoliciesByRole, PolicyNames, SlowStart
from tandem_services.router.predicting import predicted_latency
from tandem_services.router.probing import Probing
from tandem_services.router.redis_functions import FunctionLibrary, LibrarySource, library_source
from tandem_services.router.registered_adapters import AdapterBoard
from tandem_services.router.registry import Registry, WorkerState
from tandem_services.router.scoring import has_to_wait
from tandem_services.router.selection import Exclusions, HeldChoices, SharedChoices, TicketedChoices
from tandem_services.router.shared_state import FairBoard, QuarantineBoard, SessionBindings, UsageBoard
from tandem_services.router.starting import FIRST_WORKER_S, SeenStarts, StartingBoard, StartingWorker
from tandem_services.router.tickets import TicketBoard
from tandem_services.router.views.fleet_reader import FleetReader

LOCAL_PREFILL_TOKENS = 2048
"""A longer prompt would keep a decode worker from decoding for too long, whatever the prediction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """Settings of the router of one fleet."""

    redis: RedisAddress
    cluster: str = "default"
    deployment: Deployment = field(default_factory=Deployment)
    """Whose rows count, and whose namespace it is."""
    local_prefill_tokens: int = LOCAL_PREFILL_TOKENS
    """A decode worker computes a prompt alone where that is predicted to be faster and it lacks no more tokens than
    this; 0: only when no prefill worker can."""
    policies: PolicyNames = field(default_factory=PolicyNames)
    """Which workers the cost model may choose from, by role."""
    exploration: float = 0.0
    """Share of requests that go to workers at random, so that what is never chosen stays known."""
    explained_per_second: int = 0
    """Decisions per second that record the options they chose from (`RouteDecision.priced`), at most."""
    routing_timeout_s: float = ROUTING_TIMEOUT_S
    background_timeout_s: float = BACKGROUND_TIMEOUT_S
    """Deadline of a command that no request waits for."""
    start_timeout_s: float = 30.0
    """How long `start` waits for Redis."""


@dataclass(kw_only=True, slots=True)
class RouterCounters:
    """Since start, for the metrics endpoint."""

    redis: int = 0
    local: int = 0
    none: int = 0
    placements: Counter[Placement] = field(default_factory=Counter)
    malformed: int = 0
    """Malformed values in Redis [redis-values-untrusted]."""
    refresh_failures: int = 0


@dataclass(kw_only=True, slots=True)
class ExplainBudget:
    """Limits how many decisions per second record their options."""

    clock: Clock
    per_second: int
    """0: no decision does."""
    _second: int = -1
    _spent: int = 0

    def spend(self) -> bool:
        """Whether this decision records its options."""
        second = int(self.clock.now())
        if second != self._second:
            self._second, self._spent = second, 0
        if self._spent >= self.per_second:
            return False
        self._spent += 1
        return True


logger = logging.getLogger(__name__)

MAX_RESERVED_OUTPUT = 512
"""Few requests use all of a generous max_tokens; room is reserved for no more than this many output tokens."""

RETRY_AFTER_S = 2.0
"""A worker that just vanished is back, or replaced by another, after about this long at best."""


class Router:
    """See the module docstring. All methods belong to one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        clock: Clock | None = None,
        random: Random | None = None,
        source: LibrarySource | None = None,
    ) -> None:
        """`source`: the functions to call in Redis instead of the product's own."""
        self.counters = RouterCounters()
        self._config = config
        self._clock = clock or MonotonicClock()
        self._random = random or Random()
        keys = Keys(config.cluster, config.deployment.namespace)
        self._routing = RedisClient(config.redis, timeout_s=config.routing_timeout_s)
        self._background = RedisClient(config.redis, timeout_s=config.background_timeout_s)
        self.sessions = SessionBindings(client=self._background, keys=keys)
        """Which worker keeps which conversation."""
        self.quarantine = QuarantineBoard(client=self._background, keys=keys)
        """Which requests no worker should see again."""
        source = source or library_source()
        self.usage = UsageBoard(library=FunctionLibrary(self._routing, source), keys=keys)
        """What tenants have used of their limits."""
        self.fairness = FairBoard(library=FunctionLibrary(self._background, source), keys=keys)
        """What tenants have had of the fleet."""
        self.adapters = AdapterBoard(library=FunctionLibrary(self._background, source), keys=keys)
        """What gateways have registered."""
        registry = Registry(library=FunctionLibrary(self._background, source), keys=keys, deployment=config.deployment)
        self.end_reports = registry
        """How workers have ended."""
        self._reader = FleetReader(registry=registry, clock=self._clock)
        board = StartingBoard(FunctionLibrary(self._background, source), keys, config.deployment)
        self._starts = SeenStarts(board=board, clock=self._clock)
        self._membership = Membership(clock=self._clock)
        self._own = OwnLoad(clock=self._clock)
        index = BlockIndex(library=FunctionLibrary(self._routing, source), keys=keys)
        self._held = HeldChoices(clock=self._clock, own=self._own, membership=self._membership, index=index)
        chains = LastChain()
        self._shared = SharedChoices(
            index=index,
            chains=chains,
            membership=self._membership,
            random=self._random,
            refresh=self.refresh,
            next_serial=self._held.next_serial,
        )
        self._ticketed = TicketedChoices(
            board=TicketBoard(client=self._routing, keys=keys),
            membership=self._membership,
            held=self._held,
            refresh=self._refresh_if_possible,
        )
        self._local = LocalChoices(
            routing=LocalRouting(own=self._own, random=self._random),
            few=FewWorkers(membership=self._membership, own=self._own, random=self._random),
            membership=self._membership,
            random=self._random,
            chains=chains,
            in_flight=PromptsInFlight(clock=self._clock),
            next_serial=self._held.next_serial,
        )
        self._slow_start = SlowStart(clock=self._clock)
        self._probing = Probing(clock=self._clock, membership=self._membership, random=self._random)
        self._explain_budget = ExplainBudget(clock=self._clock, per_second=config.explained_per_second)
        policies = PoliciesByRole(
            config.policies,
            self._random,
            self._own.outstanding,
            slow_start=self._slow_start,
            exploration=config.exploration,
        )
        self._adapter_prices = AdapterPrices(clock=self._clock)
        self._exclusions = Exclusions(membership=self._membership, policies=policies, adapters=self._adapter_prices)
        self._refreshed_at = self._clock.now()
        self._refresher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises `RedisUnavailableError`, with the fix in its message, when Redis cannot be used at all."""
        await self._background.require(wait_s=self._config.start_timeout_s)
        await self.refresh()
        self.begin()

    def begin(self) -> None:
        """Renew the view of the fleet from now on; Redis need not answer yet."""
        self._refresher = asyncio.create_task(self._keep_refreshing(), name="router-refresh")

    async def stop(self) -> None:
        if self._refresher is not None:
            self._refresher.cancel()
            await asyncio.gather(self._refresher, return_exceptions=True)
        await self._held.settle()
        await self._routing.close()
        await self._background.close()

    async def refresh(self) -> None:
        """Take the registry's view now. Raises `RedisUnavailableError`."""
        requested_at = self._clock.now()
        snapshot = await self._reader.snapshot(missing=self._membership.unlisted)
        self.counters.malformed += snapshot.malformed
        self._membership.update(snapshot, requested_at=requested_at)
        self._refreshed_at = self._clock.now()
        known = {worker.incarnation for worker in self._membership.workers()}
        self._own.forget_all_but(known)
        self._slow_start.observe(known)
        self._probing.look()

    def workers(self) -> tuple[WorkerView, ...]:
        """The fleet as last seen, without those that `mark_dead` named."""
        return self._membership.workers()

    def peers(self, worker: WorkerView) -> tuple[WorkerView, ...]:
        """All workers that `worker` may exchange KV with, and others of its fleet."""
        del worker
        return self.workers()

    def offered(self) -> tuple[WorkerView, ...]:
        """See `Membership.offered`."""
        return self._membership.offered()

    def ready(self) -> tuple[WorkerView, ...]:
        """See `Membership.ready`."""
        return self._membership.ready()

    def starting(self) -> tuple[StartingWorker, ...]:
        """See `SeenStarts.ask`."""
        return self._starts.ask()

    def prefill_rate(self, model: str) -> float:
        """Prompt tokens per second of the fleet; 0 while no worker computes prompts."""
        return self._membership.prefill_rate(model)

    def fleet(self) -> FleetView:
        """The fleet as last seen, for people: those that `mark_dead` named included."""
        self._reader.viewed()
        return FleetView(
            members=self._membership.members(),
            age_s=self._clock.now() - self._refreshed_at,
            starting=self._starts.workers,
        )

    def knows(self, incarnation: str) -> bool:
        """Whether this incarnation is in the view."""
        return self._membership.find(incarnation) is not None

    @property
    def redis_answers(self) -> bool:
        """Whether the last routing calls had an answer."""
        return self._routing.breaker.state is BreakerState.CLOSED

    @property
    def redis_failures(self) -> int:
        """Routing calls without a usable answer since start."""
        return self._routing.failures

    def require_encoding(self, digest: str) -> None:
        """See `Membership.require_encoding`."""
        self._membership.require_encoding(digest)

    def rely_on(self, proofs: MemberProofs) -> None:
        """From now on only workers that prove to be members are chosen."""
        self._membership.rely_on(proofs)

    def mark_dead(self, incarnation: str) -> None:
        """The gateway lost its connection to this worker: do not choose it."""
        self._membership.mark_dead(incarnation)

    def mark_alive(self, incarnation: str) -> None:
        """A worker that `mark_dead` named has answered this gateway since."""
        self._membership.mark_alive(incarnation)

    def note_refusal(self, incarnation: str, state: WorkerState) -> None:
        """A worker has sent a request away because it is in `state`: do not choose it from the view of before."""
        self._membership.note_refusal(incarnation, state)

    async def choose(self, query: RouteQuery) -> RouteDecision:
        """The workers for one attempt. Raises `NoWorkersError` when no worker can take it now."""
        decision = await self._probed(query) or await self._find(query)
        if decision is not None and query.compat_hash not in (None, decision.decode.compat_hash):
            # It registered since the last view, and is known from now on.
            await self.release(self._noted(decision))
            decision = await self._find(query)
        if decision is None:
            self.counters.none += 1
            raise NoWorkersError(
                f"no worker for model {query.model[:100]!r} can take a prompt of {len(query.token_ids)} tokens now",
                retry_after=RETRY_AFTER_S,
            )
        return self._noted(decision)

    async def stay(self, query: RouteQuery, incarnation: str) -> RouteDecision:
        """This worker and no other, whatever else would be cheaper. Raises `NoWorkersError` when it is gone."""
        if self._membership.unknown({incarnation}):
            await self._refresh_if_possible()
        record = self._membership.find(incarnation)
        if record is None or not await self._membership.prove(incarnation, within_s=KEEPER_WAIT_S):
            raise NoWorkersError(f"worker {incarnation} is gone", retry_after=RETRY_AFTER_S)
        demand = self._demand(query)
        claim = Claim(incarnation, demand.prompt_tokens, 1, room_needed(demand))
        decision = RouteDecision(
            request_id=query.request_id,
            decode=record.view,
            prefill=None,
            source=Source.SESSION,
            placement=Placement.ALONE,
            terms=(),
            matched_tokens=0,
            reservation=Reservation(None, (claim,), self._held.next_serial()),
        )
        return self._noted(decision)

    async def relocate(self, query: RouteQuery, leaving: WorkerView) -> RouteDecision:
        """A worker that takes over what `leaving` generates, with its KV: the prefill end of the choice is `leaving`.

        Raises `NoWorkersError` when no other worker has capacity now: then the request stays where it is.
        """
        decision = await self.choose(
            replace(query, exclude=query.exclude | {leaving.incarnation}, compat_hash=leaving.compat_hash)
        )
        # In a view that is a heartbeat old, a worker that was just withdrawn may seem to have capacity.
        outdated = decision.source is Source.LOCAL and self._routing.available
        if outdated or has_to_wait(decision.terms):
            await self.release(decision)
            raise NoWorkersError(
                f"no worker has capacity for a sequence of {len(query.token_ids)} tokens", retry_after=RETRY_AFTER_S
            )
        # It has all of it, whatever else was cheaper for another one.
        return replace(decision, prefill=leaving, fetch=None, priced=None, latency=None)

    async def release(self, decision: RouteDecision) -> None:
        """The attempt has ended, or never began. Releasing twice counts once."""
        self._local.in_flight.take_back(decision.reservation.serial)
        await self._held.release(decision)

    def release_soon(self, decision: RouteDecision) -> None:
        """As `release`, without a wait."""
        self._local.in_flight.take_back(decision.reservation.serial)
        self._held.release_soon(decision)

    async def issue_ticket(self, ticket_id: str, decision: RouteDecision, query: RouteQuery) -> bool:
        """Allow the holder of `ticket_id` to execute `decision`, which is still to be released here.

        False when that is not possible: without a shared reservation, or without Redis.
        """
        return await self._ticketed.issue(ticket_id, decision, query)

    async def redeem(self, ticket_id: str, query: RouteQuery) -> RouteDecision | None:
        """The choice of a ticket, which is to be released as any other; None when it is void.

        It is void when it was issued for another prompt, is not there any more, or names workers that are gone.
        """
        decision = await self._ticketed.redeem(ticket_id, query)
        if decision is None:
            return None
        find, prefill = self._membership.find, decision.prefill
        latency = predicted_latency(
            decision.terms,
            query,
            self._demand(query),
            decode=find(decision.decode.incarnation),
            prefill=None if prefill is None else find(prefill.incarnation),
        )
        return self._noted(replace(decision, latency=latency))

    async def release_unredeemed(self, ticket_id: str, decision: RouteDecision) -> None:
        """As `release`, of a choice with a ticket: after redemption the other process releases the reservation."""
        if await self._ticketed.was_redeemed(ticket_id, decision):
            self._held.drop(decision)
        await self.release(decision)

    async def _probed(self, query: RouteQuery) -> RouteDecision | None:
        """A suspect that a request is due for, if there is one and it begins at once."""
        probe = self._probing.probe(query)
        decision = None if probe is None else await self._find(probe)
        if decision is None or self._probing.is_measured(decision):
            return decision
        await self.release(self._noted(decision))
        return None

    async def _find(self, query: RouteQuery) -> RouteDecision | None:
        known = self._membership.unusable
        decision = await self._find_allowed(query)
        again = decision is None and self._membership.unusable - known  # a policy's choice has not answered
        return await self._find_allowed(query) if again else decision

    async def _find_allowed(self, query: RouteQuery) -> RouteDecision | None:
        query = self._exclusions.narrowed(query)
        decision = await self._find_among(query)
        if decision is not None and query.absences:
            self._adapter_prices.note(decision, query)
        return decision

    async def _find_among(self, query: RouteQuery) -> RouteDecision | None:
        explained = self._explain_budget.spend()
        share = self._membership.unlisted_share(query.model)
        if share > 0.0 and self._random.random() < share:
            decision = await self._choose_locally(query, explained=explained)
            if decision is not None:
                return decision
        return await self._choose_in_redis(query, explained=explained) or await self._choose_locally(
            query, explained=explained
        )

    async def _choose_in_redis(self, query: RouteQuery, *, explained: bool) -> RouteDecision | None:
        """None when Redis is unavailable: the caller decides locally."""
        if not self._routing.available:
            return None
        known = self._membership.unusable
        try:
            decision = await self._shared.choose(query, self._demand(query), explained=explained)
            if decision is None and (learned := self._membership.unusable - known):
                # A chosen worker does not answer, or has no signed row.
                query = replace(query, exclude=query.exclude | learned)
                decision = await self._shared.choose(query, self._demand(query), explained=explained)
        except RedisUnavailableError:
            return None
        if decision is not None and decision.placement is Placement.DEGRADED and self._membership.unlisted:
            # Redis has no prefill worker; the view may.
            paired = await self._local.choose(query, self._demand(query), explained=explained)
            if paired is not None and paired.prefill is not None:
                await self._held.give_back(query.request_id, decision.reservation)
                self.counters.local += 1
                return paired
        self.counters.redis += decision is not None
        return decision

    async def _choose_locally(self, query: RouteQuery, *, explained: bool) -> RouteDecision | None:
        decision = await self._local.choose(query, self._demand(query), explained=explained)
        self.counters.local += decision is not None
        return decision

    async def _refresh_if_possible(self) -> None:
        try:
            await self.refresh()
        except RedisUnavailableError:
            self.counters.refresh_failures += 1

    def _demand(self, query: RouteQuery) -> Demand:
        return Demand(
            prompt_tokens=len(query.token_ids),
            output_tokens=min(query.max_tokens, MAX_RESERVED_OUTPUT),
            local_prefill_tokens=0 if query.paired else self._config.local_prefill_tokens,
        )

    def _noted(self, decision: RouteDecision) -> RouteDecision:
        """`decision`, which its caller will release."""
        self.counters.placements[decision.placement] += 1
        self._held.add(decision)
        self._probing.note(decision)
        return decision

    async def _keep_refreshing(self) -> None:
        # A view that stops refreshing would go unnoticed until workers are gone.
        failure = "cannot refresh the view of the fleet"
        await run_periodically(self._refresh_view, every_s=self._until_next_view, logger=logger, failure=failure)

    def _until_next_view(self) -> float:
        served = any(worker.role is not Role.PREFILL for worker in self.workers())
        return HEARTBEAT_S if served or self._clock.now() - self._refreshed_at >= HEARTBEAT_S else FIRST_WORKER_S

    async def _refresh_view(self) -> None:
        await self._refresh_if_possible()
        await self._starts.refresh(viewed=self._reader.is_viewed)
