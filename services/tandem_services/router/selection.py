"""The ways to make a choice: in Redis for all gateways, locally without Redis, or by redeeming a ticket.

    SharedChoices    Redis: hashes the prompt, calls `route_and_reserve` once, and resolves the incarnations in the
                     view; one that registered since needs a new view. Redis sees only the hashes of the prompt
    LocalChoices     the view of this gateway (`LocalRouting`), while Redis is unavailable
    TicketedChoices  choices of another process, redeemed by a ticket in Redis (`tickets`); none without Redis
    HeldChoices      choices in progress: this gateway's own load, released when they end. A reservation in Redis counts
                     for `RESERVATION_MS`; after that there is nothing to release

`prompt_chain` computes the digests of a prompt's blocks. Each depends on the one before it, at 0.6 µs a block: a
millisecond for 32k tokens. It yields to the event loop after each slice, and `LastChain` avoids hashing a prompt again
that is waiting for capacity.

`LocalRouting` chooses the least predicted wait:

1. Every choice is recorded with the prefill work and the sequence that it adds, also those that Redis made.
2. Without Redis the same cost model uses these records in place of reports and reservations. In place of the index it
   assumes that a prompt is cached on the worker that its first block hashes to (rendezvous hashing, so that a worker
   that leaves moves only its own prompts). If that worker's wait exceeds recomputing the prompt, another one is chosen.
3. Blocks of prompts that this gateway has just sent to a worker count as cached there (`in_flight`).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count
from random import Random

from tandem_engine.base.clock import Clock
from tandem_engine.config import Role
from tandem_engine.messages.kv_events import BASE_SPACE, CacheSpace, chain_hashes
from tandem_engine.messages.requests import about_attempt
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.cost import (
    ASSUMED_PREFILL_RATE,
    PRESENT,
    Candidate,
    Demand,
    PricedFetch,
    room_needed,
    uncached,
)
from tandem_services.router.decision import Absence, Choice, Claim, PlannedFetch, Reservation, RouteQuery, Source
from tandem_services.router.in_flight import PromptsInFlight
from tandem_services.router.index import BlockIndex, Routed
from tandem_services.router.keys import MAX_CHAIN_BLOCKS, RESERVATION_MS
from tandem_services.router.membership import PROOF_WAIT_S, Membership
from tandem_services.router.predicting import predicted_latency
from tandem_services.router.registry import WorkerRecord
from tandem_services.router.scoring import (
    Option,
    cheapest,
    computed_in_s,
    options,
    placement_of,
    planned_fetch,
    priced_options,
)
from tandem_services.router.tickets import Ticket, TicketBoard

SLICE_BLOCKS = 512
"""Hashed in a third of a millisecond."""


MAX_ALLOWED = 16
"""Workers that a call names as the only ones, instead of all others as excluded."""


async def prompt_chain(token_ids: Sequence[int], page_size: int, *, space: CacheSpace, most_blocks: int) -> list[bytes]:
    """Digests of the first whole pages of a prompt, at most `most_blocks`."""
    blocks = min(len(token_ids) // page_size, most_blocks)
    chain: list[bytes] = []
    parent = space.seed
    for first in range(0, blocks, SLICE_BLOCKS):
        if first:
            await asyncio.sleep(0)
        last = min(first + SLICE_BLOCKS, blocks)
        chain += chain_hashes(token_ids[first * page_size : last * page_size], page_size, parent=parent)
        parent = chain[-1]
    return chain


@dataclass(slots=True)
class LastChain:
    """`prompt_chain` that keeps what it has computed last."""

    _token_ids: Sequence[int] = ()
    _hashed_as: tuple[int, CacheSpace, int] = (0, BASE_SPACE, 0)
    _chain: list[bytes] = field(default_factory=list)

    async def of(self, token_ids: Sequence[int], page_size: int, *, space: CacheSpace, most_blocks: int) -> list[bytes]:
        """As `prompt_chain`; not to be changed, nor are `token_ids`, which are known by their identity."""
        hashed_as = (page_size, space, most_blocks)
        if token_ids is self._token_ids and hashed_as == self._hashed_as:
            return self._chain
        chain = await prompt_chain(token_ids, page_size, space=space, most_blocks=most_blocks)
        self._token_ids, self._hashed_as, self._chain = token_ids, hashed_as, chain
        return chain


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedChoices:
    """Choices made in Redis. `refresh` brings a new view of the fleet."""

    index: BlockIndex
    membership: Membership
    random: Random
    refresh: Callable[[], Awaitable[None]]
    next_serial: Callable[[], int]
    chains: LastChain

    async def choose(self, query: RouteQuery, demand: Demand, *, explained: bool) -> Choice | None:
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
            exclude=frozenset() if allowed else query.exclude,
            allowed=allowed,
            absences=query.absences,
            seed=self.random.getrandbits(31),
            explained=explained,
        )
        return None if routed is None else await self._resolve(query, demand, routed)

    def _allowed(self, query: RouteQuery) -> frozenset[str] | None:
        """The workers that are not excluded, if they are few and the others many: only a policy leaves out so many."""
        if len(query.exclude) <= MAX_ALLOWED:
            return None
        records = self.membership.candidates(query.model, prompt_tokens=len(query.token_ids), exclude=query.exclude)
        return frozenset(each.view.incarnation for each in records) if 0 < len(records) <= MAX_ALLOWED else None

    async def _resolve(self, query: RouteQuery, demand: Demand, routed: Routed) -> Choice | None:
        """Addresses of the chosen incarnations.

        None when one of them was found dead during the query, has no valid record, does not answer, or is not of the
        required kind: the content of Redis alone is no reason to send it something.
        """
        chosen = {incarnation for incarnation in (routed.decode, routed.prefill) if incarnation is not None}
        if self.membership.unknown(chosen):
            await self.refresh()
        for incarnation in self.membership.unknown(chosen):
            self.membership.note_nameless(incarnation)
        proven = [await self.membership.prove(incarnation, within_s=PROOF_WAIT_S) for incarnation in sorted(chosen)]
        decode = self.membership.find(routed.decode)
        prefill = None if routed.prefill is None else self.membership.find(routed.prefill)
        if decode is None or not all(proven) or not _suits(query, decode, prefill):
            return None
        return Choice(
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


@dataclass(kw_only=True, slots=True)
class OwnLoad:
    """What this gateway has sent to the workers and not yet got back."""

    clock: Clock
    _busy_until: dict[str, float] = field(default_factory=dict)
    """Per incarnation, when the prefill work given to it should be done."""
    _sequences: Counter[str] = field(default_factory=Counter)

    def add(self, claims: Iterable[Claim], rates: dict[str, float]) -> None:
        """Note a choice. `rates`: prefill tokens per second by incarnation."""
        now = self.clock.now()
        for claim in claims:
            self._sequences[claim.incarnation] += claim.sequences
            start = max(now, self._busy_until.get(claim.incarnation, now))
            self._busy_until[claim.incarnation] = start + claim.queue_tokens / rates[claim.incarnation]

    def remove(self, claims: Iterable[Claim]) -> None:
        """The attempt has ended. Its prefill work is over by then or will be by prediction."""
        for claim in claims:
            self._sequences[claim.incarnation] = max(0, self._sequences[claim.incarnation] - claim.sequences)

    def wait_s(self, incarnation: str) -> float:
        return max(0.0, self._busy_until.get(incarnation, 0.0) - self.clock.now())

    def sequences(self, incarnation: str) -> int:
        return self._sequences[incarnation]

    def forget_all_but(self, incarnations: set[str]) -> None:
        """Drop notes about workers that are gone."""
        for gone in self._sequences.keys() - incarnations:
            del self._sequences[gone]
        for gone in self._busy_until.keys() - incarnations:
            del self._busy_until[gone]


@dataclass(kw_only=True, slots=True)
class LocalRouting:
    """Chooses from the last view. Takes well under a millisecond for a hundred workers."""

    own: OwnLoad
    random: Random

    def choose(
        self,
        records: Sequence[WorkerRecord],
        demand: Demand,
        first_block: bytes | None,
        in_flight: Mapping[str, int] | None = None,
        absences: Mapping[str, Absence] | None = None,
    ) -> Option | None:
        """The cheapest of `options`; None when there are none."""
        return cheapest(self.options(records, demand, first_block, in_flight, absences), self.random)

    def options(
        self,
        records: Sequence[WorkerRecord],
        demand: Demand,
        first_block: bytes | None,
        in_flight: Mapping[str, int] | None = None,
        absences: Mapping[str, Absence] | None = None,
    ) -> list[Option]:
        """Empty when no record can decode.

        `first_block`: digest of the prompt's first page, if it has one. `in_flight`: prompt tokens that workers will
        have cached soon, by incarnation. `absences`: of workers that have to load the adapter.
        """
        homes, coming = _homes(records, first_block), in_flight or {}
        candidates = []
        for record in records:
            incarnation = record.view.incarnation
            guessed = demand.prompt_tokens // 2 if incarnation in homes else 0
            candidate = self._candidate(record, guessed, min(coming.get(incarnation, 0), demand.prompt_tokens))
            candidates.append(replace(candidate, absence=(absences or {}).get(incarnation, PRESENT)))
        return options(candidates, demand, self.random)

    def _candidate(self, record: WorkerRecord, guessed: int, coming: int) -> Candidate:
        incarnation, matched = record.view.incarnation, max(guessed, coming)
        load = replace(
            record.load,
            queue_tokens=self.own.wait_s(incarnation) * record.load.prefill_rate,
            sequences=self.own.sequences(incarnation),
        )
        return Candidate(
            view=record.view, load=load, matched=matched, in_flight=matched - guessed, links=record.link_rates
        )


def claims_of(option: Option, demand: Demand) -> tuple[Claim, ...]:
    """Load that `option` adds; the same as `claims` in scripts/route.lua."""
    decode, computing = option.decode.view.incarnation, option.computing
    queue, room = uncached(computing.known, demand), room_needed(demand)
    if option.prefill is None:
        return (Claim(decode, queue, 1, room),)
    return (
        Claim(computing.view.incarnation, queue, 0, demand.prompt_tokens),
        Claim(decode, 0, 1, room),
    )


def _homes(records: Sequence[WorkerRecord], first_block: bytes | None) -> set[str]:
    """Where prompts with this first block go by default: one worker per role."""
    if first_block is None:
        return set()
    homes = set()
    for role in Role:
        of_role = [record.view.incarnation for record in records if record.view.role is role]
        if of_role:
            homes.add(max(of_role, key=lambda name: _affinity(first_block, name)))
    return homes


def _affinity(first_block: bytes, incarnation: str) -> bytes:
    return blake2b(incarnation.encode(), key=first_block, digest_size=8).digest()


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

    def next_serial(self) -> int:
        """Serial of the next choice to hold."""
        return next(self._serials)

    def add(self, choice: Choice) -> None:
        """It will be released."""
        rates = {}
        for claim in choice.reservation.claims:
            record = self.membership.find(claim.incarnation)
            rates[claim.incarnation] = record.load.prefill_rate if record else ASSUMED_PREFILL_RATE
        self.own.add(choice.reservation.claims, rates)
        self._chosen_at[choice.reservation.serial] = self.clock.now()

    async def release(self, choice: Choice) -> None:
        """Releasing twice counts once."""
        reserved = self.reserves(choice)
        if self.drop(choice) and reserved:
            await self.give_back(choice.request_id, choice.reservation)

    def drop(self, choice: Choice) -> bool:
        """As `release`, of a reservation that another process releases in Redis, or none. False if it was not held."""
        if self._chosen_at.pop(choice.reservation.serial, None) is None:
            return False
        self.own.remove(choice.reservation.claims)
        return True

    def reserves(self, choice: Choice) -> bool:
        """Whether what it reserved in Redis may still count."""
        chosen_at = self._chosen_at.get(choice.reservation.serial, float("-inf"))
        return choice.reservation.bucket is not None and self.clock.now() - chosen_at <= RESERVATION_MS / 1000

    async def give_back(self, request_id: str, reservation: Reservation) -> None:
        """In Redis alone. Without Redis it expires by itself."""
        try:
            await self.index.release(reservation)
        except RedisUnavailableError:
            fields = about_attempt(request_id)
            logger.debug("cannot release the reservation of %s, it expires", request_id, extra={"fields": fields})


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalChoices:
    """Choices made from the local view of the fleet, without Redis."""

    routing: LocalRouting
    membership: Membership
    random: Random
    chains: LastChain
    in_flight: PromptsInFlight
    next_serial: Callable[[], int]

    async def choose(self, query: RouteQuery, demand: Demand, *, explained: bool) -> Choice | None:
        """Nothing is reserved that others could see; None when no worker can take it."""
        page_size = self.membership.page_size(query.model) or 1
        chain = await self.chains.of(query.token_ids, page_size, space=query.space, most_blocks=MAX_CHAIN_BLOCKS)
        records = self.membership.candidates(query.model, prompt_tokens=demand.prompt_tokens, exclude=query.exclude)
        if not records:
            return None
        coming = {name: blocks * page_size for name, blocks in self.in_flight.matches(chain).items()}
        options = self.routing.options(records, demand, chain[0] if chain else None, coming, query.absences)
        option = cheapest(options, self.random)
        if option is None:
            return None
        serial, computing = self.next_serial(), option.computing
        find, prefill = self.membership.find, option.prefill
        if computing.view.page_size == page_size:
            self.in_flight.note(serial, chain, computing.view.incarnation, computed_in_s(option.terms))
        return Choice(
            request_id=query.request_id,
            decode=option.decode.view,
            prefill=None if prefill is None else prefill.view,
            source=Source.LOCAL,
            placement=option.placement,
            terms=option.terms,
            matched_tokens=0,
            fetch=planned_fetch(computing, demand),
            priced=priced_options(options, option) if explained else None,
            latency=predicted_latency(
                option.terms,
                query,
                demand,
                decode=find(option.decode.view.incarnation),
                prefill=None if prefill is None else find(prefill.view.incarnation),
            ),
            reservation=Reservation(None, claims_of(option, demand), serial),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TicketedChoices:
    """Choices that another router has reserved, redeemed by ticket. `refresh` gets a new view of the fleet."""

    board: TicketBoard
    membership: Membership
    held: HeldChoices
    refresh: Callable[[], Awaitable[None]]

    async def issue(self, ticket_id: str, choice: Choice, query: RouteQuery) -> bool:
        """Whether the holder of `ticket_id` may execute `choice`: not without a shared reservation."""
        if choice.reservation.bucket is None:
            return False
        try:
            await self.board.issue(ticket_id, Ticket.of(choice, query))
        except RedisUnavailableError:
            return False
        return True

    async def redeem(self, ticket_id: str, query: RouteQuery) -> Choice | None:
        """The choice of a ticket, which is not held here yet; None when it is void."""
        try:
            ticket = await self.board.take(ticket_id)
        except RedisUnavailableError:
            return None
        if ticket is None:
            return None
        if self.membership.unknown({ticket.decode, *([ticket.prefill] if ticket.prefill else [])}):
            await self.refresh()
        choice = ticket.choice_for(query, self.membership.find_usable, self.held.next_serial())
        if choice is None:
            await self.held.give_back(query.request_id, ticket.reservation)
        return choice

    async def was_redeemed(self, ticket_id: str, choice: Choice) -> bool:
        """Whether another process releases what `choice` has reserved. Its ticket is void from now on."""
        try:
            return self.held.reserves(choice) and await self.board.take(ticket_id) is None
        except RedisUnavailableError:
            return True  # Unknown. The reservation expires by itself.
