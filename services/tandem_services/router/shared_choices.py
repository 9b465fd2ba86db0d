"""Choices by what all gateways share: the index, everybody's reservations, one decision after the other in Redis.

1. hash      the prompt's chain of blocks, which is all that Redis learns of it
2. ask       one call of `route_and_reserve`
3. resolve   the incarnations that it names are looked up in the view; one that registered since needs a new view
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from random import Random

from tandem_services.router.candidate import Candidate, PricedFetch
from tandem_services.router.choice import Choice, PlannedFetch, RouteQuery, Source
from tandem_services.router.cost import Demand
from tandem_services.router.fetching import planned_fetch
from tandem_services.router.index import BlockIndex, Routed
from tandem_services.router.keys import MAX_CHAIN_BLOCKS
from tandem_services.router.membership import PROOF_WAIT_S, Membership
from tandem_services.router.prompt_chain import LastChain
from tandem_services.router.registry import WorkerRecord
from tandem_services.router.scoring import placement_of


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedChoices:
    """One per router. `refresh` brings a new view of the fleet."""

    index: BlockIndex
    membership: Membership
    random: Random
    refresh: Callable[[], Awaitable[None]]
    next_serial: Callable[[], int]
    chains: LastChain

    async def choose(self, query: RouteQuery, demand: Demand, *, told: bool) -> Choice | None:
        """Reserved; None when Redis knows nobody. Raises `RedisUnavailableError`."""
        page_size = self.membership.page_size(query.model)
        if page_size is None:
            return None
        chain = await self.chains.of(query.token_ids, page_size, salt=query.cache_salt, most_blocks=MAX_CHAIN_BLOCKS)
        routed = await self.index.route(
            model=query.model,
            demand=demand,
            page_size=page_size,
            chain=b"".join(chain),
            exclude=query.exclude,
            seed=self.random.getrandbits(31),
            told=told,
        )
        return None if routed is None else await self._resolve(query, demand, routed)

    async def _resolve(self, query: RouteQuery, demand: Demand, routed: Routed) -> Choice | None:
        """Addresses of the chosen incarnations.

        None when one of them was found dead while Redis was asked, has no record that makes sense, does not answer, or
        is no such worker as it was chosen for: what Redis says of it is no reason to send it something.
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
            reservation=replace(routed.reservation, serial=self.next_serial()),
        )

    def _fetch_of(self, routed: Routed, demand: Demand) -> PlannedFetch | None:
        """None, too, when the source is not known here: without its address nothing can be asked of it."""
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
    return prefill is None or (prefill.view.model, prefill.view.compat_hash) == (query.model, decode.view.compat_hash)
