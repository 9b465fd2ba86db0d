"""The ways to make a choice: in Redis for all gateways, locally without Redis, or by redeeming a ticket.

SharedChoices    Redis: hashes the prompt, calls `route_and_reserve` once, and resolves the incarnations in the
                 view; one that registered since needs a new view. Redis sees only the hashes of the prompt
LocalChoices     the view of this gateway, while Redis is unavailable (`local_choices`)
TicketedChoices  choices of another process, redeemed by a ticket in Redis (`tickets`); none without Redis
Exclusions       what a query may not have, before it asks for prices: what policies leave out, and workers that are
                 unusable for it
HeldChoices      choices in progress: this gateway's own load, released when they end. A reservation in Redis counts
                 for `RESERVATION_MS`; after that there is nothing to release
"""

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from random import Random

from tandem_engine.base.clock import Clock
from tandem_engine.messages.requests import about_attempt
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.common.tasks import BackgroundTasks
from tandem_services.router.adapter_prices import AdapterPrices
from tandem_services.router.cost import ASSUMED_PREFILL_RATE, Candidate, Demand, PricedFetch
from tandem_services.router.decision import PlannedFetch, Reservation, RouteDecision, RouteQuery, Source, WorkerView
from tandem_services.router.index import BlockIndex, LastChain, Routed
from tandem_services.router.keys import MAX_CHAIN_BLOCKS, RESERVATION_MS
from tandem_services.router.local_choices import OwnLoad
from tandem_services.router.membership import Membership
from tandem_services.router.policies import PoliciesByRole
from tandem_services.router.predicting import predicted_latency
from tandem_services.router.registry import WorkerRecord
from tandem_services.router.scoring import placement_of, planned_fetch
from tandem_services.router.tickets import Ticket, TicketBoard

RELEASED_AT_ONCE = 64
"""Reservations that one call of Redis gives back: a few hundred microseconds, in which it answers no other client."""

MAX_ALLOWED = 16
"""Workers that a call names as the only ones, instead of all others as excluded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedChoices:
    """Choices made in Redis. `refresh` brings a new view of the fleet."""

    index: BlockIndex
    membership: Membership
    random: Random
    refresh: Callable[[], Awaitable[None]]
    next_serial: Callable[[], int]
    chains: LastChain

    async def choose(self, query: RouteQuery, demand: Demand, *, explained: bool) -> RouteDecision | None:
        """Reserved; None when Redis has no worker for it. Raises `RedisUnavailableError`."""
        page_size = self.membership.page_size(query.model)
        if page_size is None:
            return None
        chain = await self.chains.of(query.token_ids, page_size, space=query.space, most_blocks=MAX_CHAIN_BLOCKS)
        allowed = self._allowed(query)
        routed = await self.index.route(
            model=query.model,
            demand=demand,
            page_size=page_size,
            chain=b"".join(chain),
            exclude=query.exclude if allowed is None else frozenset(),
            allowed=allowed,
            absences=query.absences,
            seed=self.random.getrandbits(31),
            explained=explained,
        )
        if routed is None:
            return None
        decision = await self._resolve(query, demand, routed)
        if decision is None:
            await self.index.release(routed.reservation)
        return decision

    def _allowed(self, query: RouteQuery) -> frozenset[str] | None:
        """The workers that are not excluded, if they are few and the others many: only a policy leaves out so many."""
        if query.only is None and len(query.exclude) <= MAX_ALLOWED:
            return None
        fitting = self.membership.each_candidate(
            query.model, prompt_tokens=len(query.token_ids), exclude=query.exclude, only=query.only
        )
        records = list(islice(fitting, MAX_ALLOWED + 1))
        if query.only is None and not 0 < len(records) <= MAX_ALLOWED:
            return None
        return frozenset(each.view.incarnation for each in records[:MAX_ALLOWED])

    async def _resolve(self, query: RouteQuery, demand: Demand, routed: Routed) -> RouteDecision | None:
        """Addresses of the chosen incarnations.

        None when one of them was found dead during the query, has no valid record, does not answer, or is not of the
        required kind: the content of Redis alone is no reason to send it something.
        """
        chosen = {incarnation for incarnation in (routed.decode, routed.prefill) if incarnation is not None}
        if self.membership.unknown(chosen):
            await self.refresh()
        for incarnation in self.membership.unknown(chosen):
            self.membership.note_nameless(incarnation)
        unproven = await self.membership.unproven(chosen)
        decode = self.membership.find(routed.decode)
        prefill = None if routed.prefill is None else self.membership.find(routed.prefill)
        if decode is None or unproven or not _suits(query, decode, prefill):
            return None
        return RouteDecision(
            request_id=query.request_id,
            decode=decode.view,
            prefill=None if prefill is None else prefill.view,
            source=Source.REDIS,
            placement=placement_of(decode.view.role, paired=routed.prefill is not None, degraded=routed.degraded),
            terms=routed.terms,
            matched_tokens=routed.matched_tokens,
            fetch=self._fetch_of(routed, demand),
            priced=routed.priced,
            latency=predicted_latency(routed.terms, query, demand, decode=decode, prefill=prefill),
            reservation=replace(routed.reservation, serial=self.next_serial()),
        )

    def _fetch_of(self, routed: Routed, demand: Demand) -> PlannedFetch | None:
        """None, too, when the source is not known here: without its address nothing can be fetched from it."""
        if routed.fetch is None:
            return None
        computing = self.membership.find(routed.prefill or routed.decode)
        source = self.membership.find_usable(routed.fetch.source)
        if computing is None or source is None or source.compat_hash != computing.view.compat_hash:
            return None
        fetch = PricedFetch(source=source, tokens=routed.fetch.tokens, seconds=routed.fetch.seconds)
        candidate = Candidate(view=computing.view, load=computing.load, matched=routed.matched_tokens, fetch=fetch)
        return planned_fetch(candidate, demand)


def _suits(query: RouteQuery, decode: WorkerRecord, prefill: WorkerRecord | None) -> bool:
    """Whether the workers, by what they have signed, can do what the routing rows in Redis say they can."""
    if decode.view.model != query.model or decode.view.context_length <= len(query.token_ids):
        return False
    if not all(query.served_by(record.view) for record in (decode, prefill) if record is not None):
        return False
    return prefill is None or (prefill.view.model, prefill.view.compat_hash) == (query.model, decode.view.compat_hash)


logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class HeldChoices:
    """Choices of this router that are not released yet."""

    clock: Clock
    own: OwnLoad
    membership: Membership
    index: BlockIndex
    _serials: "count[int]" = field(default_factory=lambda: count(1))
    _chosen_at: dict[int, float] = field(default_factory=dict)
    """Choices not released yet, by serial."""
    _returned: list[Reservation] = field(default_factory=list)
    """They go back in the next iteration of the event loop."""
    _background: BackgroundTasks = field(default_factory=BackgroundTasks)

    def next_serial(self) -> int:
        """Serial of the next choice to hold."""
        return next(self._serials)

    def add(self, decision: RouteDecision) -> None:
        """It will be released."""
        rates = {}
        for claim in decision.reservation.claims:
            record = self.membership.find(claim.incarnation)
            rates[claim.incarnation] = record.load.prefill_rate if record else ASSUMED_PREFILL_RATE
        self.own.add(decision.reservation.claims, rates)
        self._chosen_at[decision.reservation.serial] = self.clock.now()

    async def release(self, decision: RouteDecision) -> None:
        """Releasing twice counts once."""
        reserved = self.reserves(decision)
        if self.drop(decision) and reserved:
            await self.give_back(decision.request_id, decision.reservation)

    def release_soon(self, decision: RouteDecision) -> None:
        """As `release`, without a wait: all that ends in this iteration of the event loop is one call of Redis."""
        reserved = self.reserves(decision)
        if not (self.drop(decision) and reserved):
            return
        if not self._returned:
            self._background.start(self._return())
        self._returned.append(decision.reservation)

    async def settle(self) -> None:
        """Wait for what is being given back. Call at shutdown."""
        await self._background.settle()

    def drop(self, decision: RouteDecision) -> bool:
        """As `release`, of a reservation that another process releases in Redis, or none. False if it was not held."""
        if self._chosen_at.pop(decision.reservation.serial, None) is None:
            return False
        self.own.remove(decision.reservation.claims)
        return True

    def reserves(self, decision: RouteDecision) -> bool:
        """Whether what it reserved in Redis may still count."""
        chosen_at = self._chosen_at.get(decision.reservation.serial, float("-inf"))
        return decision.reservation.bucket is not None and self.clock.now() - chosen_at <= RESERVATION_MS / 1000

    async def give_back(self, request_id: str, reservation: Reservation) -> None:
        """In Redis alone. Without Redis it expires by itself."""
        try:
            await self.index.release(reservation)
        except RedisUnavailableError:
            fields = about_attempt(request_id)
            logger.debug("cannot release the reservation of %s, it expires", request_id, extra={"fields": fields})

    async def _return(self) -> None:
        returned, self._returned = self._returned, []
        try:
            for first in range(0, len(returned), RELEASED_AT_ONCE):
                await self.index.release(*returned[first : first + RELEASED_AT_ONCE])
        except RedisUnavailableError:
            logger.debug("cannot release reservations, they expire", extra={"fields": {"reservations": len(returned)}})


@dataclass(frozen=True, kw_only=True, slots=True)
class TicketedChoices:
    """Choices that another router has reserved, redeemed by ticket. `refresh` gets a new view of the fleet."""

    board: TicketBoard
    membership: Membership
    held: HeldChoices
    refresh: Callable[[], Awaitable[None]]

    async def issue(self, ticket_id: str, decision: RouteDecision, query: RouteQuery) -> bool:
        """Whether the holder of `ticket_id` may execute `decision`: not without a shared reservation."""
        if decision.reservation.bucket is None:
            return False
        try:
            await self.board.issue(ticket_id, Ticket.of(decision, query))
        except RedisUnavailableError:
            return False
        return True

    async def redeem(self, ticket_id: str, query: RouteQuery) -> RouteDecision | None:
        """The choice of a ticket, which is not held here yet; None when it is void."""
        try:
            ticket = await self.board.take(ticket_id)
        except RedisUnavailableError:
            return None
        if ticket is None:
            return None
        if self.membership.unknown({ticket.decode, *([ticket.prefill] if ticket.prefill else [])}):
            await self.refresh()
        decision = ticket.choice_for(query, self.membership.find_usable, self.held.next_serial())
        workers = () if decision is None else (decision.decode, decision.prefill)
        names = [worker.incarnation for worker in workers if worker is not None]
        if await self.membership.unproven(names):
            decision = None
        if decision is None:
            await self.held.give_back(query.request_id, ticket.reservation)
        return decision

    async def was_redeemed(self, ticket_id: str, decision: RouteDecision) -> bool:
        """Whether another process releases what `decision` has reserved. Its ticket is void from now on."""
        try:
            return self.held.reserves(decision) and await self.board.take(ticket_id) is None
        except RedisUnavailableError:
            return True  # Unknown. The reservation expires by itself.


@dataclass(frozen=True, kw_only=True, slots=True)
class Exclusions:
    """Workers that a query may not use: unusable ones, those with other weights, those that cannot have its adapter,
    and those that policies leave out. Of the others, which have to load its adapter."""

    membership: Membership
    policies: PoliciesByRole
    adapters: AdapterPrices

    def narrowed(self, query: RouteQuery) -> RouteQuery:
        """`query`, which excludes all of them, and has the price of its adapter elsewhere."""
        query = query.excluding(self.membership.unusable | self._of_other_weights(query) | self._without_adapter(query))
        if query.adapter:
            able = (each for each in self._workers(query) if each.incarnation not in query.exclude)
            query = replace(query, absences=self.adapters.absences(query, able))
        return query.excluding(self.policies.passed_over(FittingWorkers(self.membership, query), query))

    def _workers(self, query: RouteQuery) -> Sequence[WorkerView]:
        """Those that it may have at most."""
        if query.only is None:
            return self.membership.workers()
        found = (self.membership.find_usable(name) for name in sorted(query.only))
        return [view for view in found if view is not None]

    def _of_other_weights(self, query: RouteQuery) -> frozenset[str]:
        """Workers whose weights differ from those that began the output."""
        return frozenset() if query.compat_hash is None else self.membership.groups.others(query.compat_hash)

    def _without_adapter(self, query: RouteQuery) -> frozenset[str]:
        if not query.adapter:
            return frozenset()
        return frozenset(each.incarnation for each in self._workers(query) if not query.served_by(each))


@dataclass(frozen=True, slots=True)
class FittingWorkers:
    """Those that could take `query`. Implements `Fitting`."""

    membership: Membership
    query: RouteQuery

    def __iter__(self) -> Iterator[WorkerView]:
        query = self.query
        fitting = self.membership.each_candidate(
            query.model, prompt_tokens=len(query.token_ids), exclude=query.exclude, only=query.only
        )
        return (record.view for record in fitting)

    def find(self, incarnation: str) -> WorkerView | None:
        query = self.query
        if query.only is not None and incarnation not in query.only:
            return None
        record = self.membership.candidate(
            incarnation, query.model, prompt_tokens=len(query.token_ids), exclude=query.exclude
        )
        return None if record is None else record.view

    def like(self, worker: WorkerView, *, first: float) -> Iterator[WorkerView]:
        names = self.membership.groups.groups(self.query.model).get((worker.role, worker.compat_hash), ())
        start = int(first * len(names))
        found = (self.find(names[(start + step) % len(names)]) for step in range(len(names)))
        return (view for view in found if view is not None)
