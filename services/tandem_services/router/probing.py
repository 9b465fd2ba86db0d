"""Requests for workers that report to be far slower than others of their kind, so that what they report stays true.

A worker measures how fast it computes prompts at its start, then with each of them. One that was disturbed at its start
is too dear for any prompt, and without prompts it measures nothing. Decode workers need no probes: an idle one has no
price, whatever its steps take.

    suspect   it computes prompts, and reports a third of the median rate of its role and compat hash
    probed    of the requests with short prompts, `SHARE` go to a suspect that has had none for `UNUSED_S` and is idle

Nothing is probed where no worker stands out.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from statistics import median

from tandem_engine.base.clock import Clock
from tandem_engine.config import Role
from tandem_services.router.decision import RouteDecision, RouteQuery
from tandem_services.router.membership import Membership
from tandem_services.router.registry import WorkerRecord
from tandem_services.router.scoring import has_to_wait, prefill_wait_s

SHARE = 0.01

SLOWER = 3.0
"""Times slower than the median: workers of one kind differ by less, unless one was disturbed, or has other hardware."""

UNUSED_S = 10.0
"""A worker that has had a request in this time measures itself."""

LOOK_S = 10.0
"""How often the reports of all workers are compared."""

MAX_TOKENS = 1024
"""Longest prompt of a probe: a worker that is as slow as it says delays no long one."""

MATES = 15
"""Decode workers that a probe may use with the suspect."""


@dataclass(kw_only=True, slots=True)
class Probing:
    """One per router; belongs to its event loop."""

    clock: Clock
    membership: Membership
    random: Random
    _suspects: dict[str, list[str]] = field(default_factory=dict)
    """Incarnations by model."""
    _chosen_at: dict[str, float] = field(default_factory=dict)
    """When each suspect was last chosen here."""
    _look_at: float = float("-inf")

    def look(self) -> None:
        """Compare all reports, if it is time to. Call with each view."""
        now, workers = self.clock.now(), self.membership.offered()
        if now < self._look_at or not workers:
            return
        self._look_at = now + LOOK_S
        kinds = defaultdict[tuple[str, Role, str], list[WorkerRecord]](list)
        for worker in workers:
            record = self.membership.find(worker.incarnation)
            if record is not None and worker.role is not Role.DECODE:
                kinds[worker.model, worker.role, worker.compat_hash].append(record)
        self._suspects = {}
        for (model, _, _), records in kinds.items():
            if slow := _slow(records):
                self._suspects.setdefault(model, []).extend(slow)
        names = {name for suspects in self._suspects.values() for name in suspects}
        self._chosen_at = {name: self._chosen_at.get(name, float("-inf")) for name in sorted(names)}

    def probe(self, query: RouteQuery) -> RouteQuery | None:
        """`query` for a suspect alone, with workers of the other role where it needs one; None for most queries."""
        suspects = self._suspects.get(query.model)
        if suspects is None or not _may_probe(query) or self.random.random() >= SHARE:
            return None
        unused = self.clock.now() - UNUSED_S
        due = [name for name in suspects if self._chosen_at[name] <= unused]
        record = self.membership.find(self.random.choice(due)) if due else None
        if record is None:
            return None
        view = record.view
        if view.role is Role.BOTH:
            return replace(query, only=frozenset((view.incarnation,)))
        mates = self.membership.groups.groups(view.model).get((Role.DECODE, view.compat_hash), ())
        if not mates:
            return None
        some = self.random.sample(mates, min(MATES, len(mates)))
        # The prompt for a slow prefill worker would be computed where it is decoded.
        return replace(query, only=frozenset((view.incarnation, *some)), paired=True)

    def is_measured(self, decision: RouteDecision) -> bool:
        """Whether this choice for a probe makes the suspect compute a prompt at once. Where others already wait there,
        it measures itself without it."""
        computing = decision.prefill or decision.decode
        waits = has_to_wait(decision.terms) or prefill_wait_s(decision.terms) > 0.0
        return computing.incarnation in self._chosen_at and not waits

    def note(self, decision: RouteDecision) -> None:
        """A request goes there."""
        if not self._chosen_at:
            return
        for worker in (decision.decode, decision.prefill):
            if worker is not None and worker.incarnation in self._chosen_at:
                self._chosen_at[worker.incarnation] = self.clock.now()


def _may_probe(query: RouteQuery) -> bool:
    """Of first attempts of the model alone."""
    others = query.exclude or query.only is not None or query.compat_hash is not None or query.adapter
    return query.may_probe and not others and len(query.token_ids) <= MAX_TOKENS


def _slow(records: Sequence[WorkerRecord]) -> Iterable[str]:
    """Incarnations of those that stand out, of one kind."""
    rate = median(record.load.prefill_rate for record in records)
    return [record.view.incarnation for record in records if record.load.prefill_rate * SLOWER < rate]
