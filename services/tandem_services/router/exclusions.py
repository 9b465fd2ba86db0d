"""Which workers a query may have: what the router knows of a fleet before it asks for prices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tandem_services.router.adapter_prices import AdapterPrices
from tandem_services.router.decision import RouteQuery, WorkerView
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
