"""Workers that a choice leaves out besides those that its query names: those that nothing may be sent to, those of
another compat hash than the output that goes on, and those that the policies pass over.
"""

from dataclasses import dataclass, replace

from tandem_services.router.choice import RouteQuery
from tandem_services.router.membership import Membership
from tandem_services.router.policies.by_role import PoliciesByRole


@dataclass(frozen=True, kw_only=True, slots=True)
class Exclusions:
    """One per router."""

    membership: Membership
    policies: PoliciesByRole

    def narrowed(self, query: RouteQuery) -> RouteQuery:
        """`query`, which excludes all of them."""
        query = replace(query, exclude=query.exclude | self.membership.unusable | self._strangers(query))
        return replace(query, exclude=query.exclude | self._passed_over(query))

    def _strangers(self, query: RouteQuery) -> frozenset[str]:
        """Workers that cannot continue what others have begun."""
        if query.compat_hash is None:
            return frozenset()
        workers = self.membership.workers()
        return frozenset(each.incarnation for each in workers if each.compat_hash != query.compat_hash)

    def _passed_over(self, query: RouteQuery) -> frozenset[str]:
        if not self.policies.narrows:
            return frozenset()
        records = self.membership.candidates(query.model, prompt_tokens=len(query.token_ids), exclude=query.exclude)
        return self.policies.passed_over((record.view for record in records), query)
