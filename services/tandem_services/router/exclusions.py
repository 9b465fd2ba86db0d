"""Which workers a decision may not use, before anything is priced."""

from dataclasses import dataclass, replace

from tandem_services.router.adapter_prices import AdapterPrices
from tandem_services.router.decision import RouteQuery
from tandem_services.router.membership import Membership
from tandem_services.router.policies import PoliciesByRole


@dataclass(frozen=True, kw_only=True, slots=True)
class Exclusions:
    """Workers that a query may not use: unusable ones, those with other weights, those that cannot have its adapter,
    and those that policies leave out. Of the others, which have to load its adapter."""

    membership: Membership
    policies: PoliciesByRole
    adapters: AdapterPrices

    def narrowed(self, query: RouteQuery) -> RouteQuery:
        """`query`, which excludes all of them, and has the price of its adapter elsewhere."""
        excluded = self.membership.unusable | self._of_other_weights(query) | self._without_adapter(query)
        query = replace(query, exclude=query.exclude | excluded)
        if query.adapter:
            able = (each for each in self.membership.workers() if each.incarnation not in query.exclude)
            query = replace(query, absences=self.adapters.absences(query, able))
        return replace(query, exclude=query.exclude | self._passed_over(query))

    def _of_other_weights(self, query: RouteQuery) -> frozenset[str]:
        """Workers whose weights differ from those that began the output."""
        return frozenset() if query.compat_hash is None else self.membership.groups.others(query.compat_hash)

    def _without_adapter(self, query: RouteQuery) -> frozenset[str]:
        if not query.adapter:
            return frozenset()
        return frozenset(each.incarnation for each in self.membership.workers() if not query.served_by(each))

    def _passed_over(self, query: RouteQuery) -> frozenset[str]:
        fitting = self.membership.each_candidate(query.model, prompt_tokens=len(query.token_ids), exclude=query.exclude)
        return self.policies.passed_over((record.view for record in fitting), query)
