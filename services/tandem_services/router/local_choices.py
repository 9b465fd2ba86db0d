"""Choices by this gateway's last view, while Redis cannot be asked. `local` prices them; here they become choices."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tandem_engine.messages.block_hash import chain_hashes, chain_seed
from tandem_services.router.choice import Choice, Reservation, RouteQuery, Source
from tandem_services.router.cost import Demand
from tandem_services.router.fetching import planned_fetch
from tandem_services.router.local import LocalRouting, claims_of
from tandem_services.router.membership import Membership
from tandem_services.router.scoring import cheapest, priced_options


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalChoices:
    """One per router."""

    routing: LocalRouting
    membership: Membership
    random: Random
    next_serial: Callable[[], int]

    def choose(self, query: RouteQuery, demand: Demand, *, told: bool) -> Choice | None:
        """Nothing is reserved that others could see; None when nobody can take it."""
        records = self.membership.candidates(query.model, prompt_tokens=demand.prompt_tokens, exclude=query.exclude)
        options = self.routing.options(records, demand, self._first_block(query)) if records else []
        option = cheapest(options, self.random)
        if option is None:
            return None
        return Choice(
            request_id=query.request_id,
            decode=option.decode.view,
            prefill=None if option.prefill is None else option.prefill.view,
            source=Source.LOCAL,
            placement=option.placement,
            terms=option.terms,
            matched_tokens=0,
            fetch=planned_fetch(option.computing, demand),
            priced=priced_options(options, option) if told else None,
            reservation=Reservation(None, claims_of(option, demand), self.next_serial()),
        )

    def _first_block(self, query: RouteQuery) -> bytes | None:
        page_size = self.membership.page_size(query.model) or 1
        first = chain_hashes(query.token_ids[:page_size], page_size, parent=chain_seed(query.cache_salt))
        return first[0] if first else None
