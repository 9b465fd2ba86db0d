"""Choices by this gateway's last view, while Redis cannot be asked. `local` prices them; here they become choices."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tandem_services.router.choice import Choice, Reservation, RouteQuery, Source
from tandem_services.router.cost import Demand
from tandem_services.router.fetching import planned_fetch
from tandem_services.router.in_flight import PromptsInFlight
from tandem_services.router.keys import MAX_CHAIN_BLOCKS
from tandem_services.router.local import LocalRouting, claims_of
from tandem_services.router.membership import Membership
from tandem_services.router.prompt_chain import LastChain
from tandem_services.router.scoring import cheapest, computed_in_s, priced_options


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalChoices:
    """One per router."""

    routing: LocalRouting
    membership: Membership
    random: Random
    chains: LastChain
    in_flight: PromptsInFlight
    next_serial: Callable[[], int]

    async def choose(self, query: RouteQuery, demand: Demand, *, told: bool) -> Choice | None:
        """Nothing is reserved that others could see; None when nobody can take it."""
        page_size = self.membership.page_size(query.model) or 1
        chain = await self.chains.of(query.token_ids, page_size, salt=query.cache_salt, most_blocks=MAX_CHAIN_BLOCKS)
        records = self.membership.candidates(query.model, prompt_tokens=demand.prompt_tokens, exclude=query.exclude)
        if not records:
            return None
        coming = {name: blocks * page_size for name, blocks in self.in_flight.matches(chain).items()}
        options = self.routing.options(records, demand, chain[0] if chain else None, coming)
        option = cheapest(options, self.random)
        if option is None:
            return None
        serial, computing = self.next_serial(), option.computing
        if computing.view.page_size == page_size:
            self.in_flight.note(serial, chain, computing.view.incarnation, computed_in_s(option.terms))
        return Choice(
            request_id=query.request_id,
            decode=option.decode.view,
            prefill=None if option.prefill is None else option.prefill.view,
            source=Source.LOCAL,
            placement=option.placement,
            terms=option.terms,
            matched_tokens=0,
            fetch=planned_fetch(computing, demand),
            priced=priced_options(options, option) if told else None,
            reservation=Reservation(None, claims_of(option, demand), serial),
        )
