"""Choices made from the last view of the fleet, without Redis.

`LocalRouting` chooses the least predicted wait:

1. Every choice is noted with the prefill work and the sequence that it adds, also one that Redis made (`OwnLoad`).
2. The cost model uses these notes in place of reports and reservations. In place of the index it assumes that a prompt
   is cached on the worker that its first block hashes to (`HashRing`). If that worker's wait exceeds recomputing the
   prompt, another one is chosen.
3. Blocks of prompts that this gateway has just sent to a worker count as cached there (`in_flight`).

`FewWorkers` keeps the cost of a decision the same in any fleet. Above `ALL_PRICED` workers it prices

    near      the first workers on the ring from the first block on, of each role
    coming    those with the longest prefix in flight
    least     the least loaded, by this gateway's own notes, of `MET` random ones of each role and compat hash
    present   the same among those that have the adapter of the request, where others would have to load it

When some role is not among these, nearly all of its workers are excluded, and all that are not are looked at.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random

from tandem_engine.base.clock import Clock
from tandem_engine.config import Role
from tandem_services.router.cost import PRESENT, Candidate, Demand, Load, room_needed, uncached
from tandem_services.router.decision import Absence, Claim, Reservation, RouteDecision, RouteQuery, Source, WorkerView
from tandem_services.router.in_flight import PromptsInFlight
from tandem_services.router.index import LastChain
from tandem_services.router.keys import MAX_CHAIN_BLOCKS
from tandem_services.router.membership import Membership
from tandem_services.router.predicting import predicted_latency
from tandem_services.router.registry import WorkerRecord
from tandem_services.router.scoring import Option, cheapest, computed_in_s, options, planned_fetch, priced_options

ALL_PRICED = 12
"""Workers of a model with no more are all priced."""

NEAR = 2
"""Workers of each role from the ring, and of all roles with a prefix in flight."""

MET = 16
"""Random ones of each group that are compared by load: the least loaded of these is among the least eighth of all."""

LEAST = 3
"""Of these, priced."""

MAX_GROUPS = 8
"""Roles × compat hashes of one decision."""

MAX_WALKED = 64
"""Points of a ring that one decision looks at: workers may be excluded, full of other work, or too short."""

MAX_ASKED = 3
"""Times that a decision chooses again because a worker does not answer."""

MAX_PRICED = 16
"""Of each role, when nearly all of one are excluded."""


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
        return self._sequences.get(incarnation, 0)

    def busy_s(self, record: WorkerRecord, now: float) -> float:
        """Seconds of work that this worker has: prompts, and a step of each sequence."""
        name = record.view.incarnation
        wait_s = max(0.0, self._busy_until.get(name, 0.0) - now)
        return wait_s + self._sequences.get(name, 0) * record.load.step_s

    def load_of(self, record: WorkerRecord, now: float) -> Load:
        """What it reports, with this gateway's notes in place of its queue and its sequences."""
        name, load = record.view.incarnation, record.load
        wait_s = max(0.0, self._busy_until.get(name, 0.0) - now)
        return load.with_work(queue_tokens=wait_s * load.prefill_rate, sequences=self._sequences.get(name, 0))

    def outstanding(self, worker: WorkerView) -> float:
        """Seconds of prompts on a prefill worker, sequences on another."""
        if worker.role is Role.PREFILL:
            return self.wait_s(worker.incarnation)
        return self.sequences(worker.incarnation)

    def forget_all_but(self, incarnations: set[str]) -> None:
        """Drop notes about workers that are gone."""
        for gone in self._sequences.keys() - incarnations:
            del self._sequences[gone]
        for gone in self._busy_until.keys() - incarnations:
            del self._busy_until[gone]


@dataclass(frozen=True, slots=True)
class Found:
    """Workers that a local decision prices."""

    records: Sequence[WorkerRecord]
    homes: frozenset[str]
    """Those where prompts with this first block go by default: one of each role."""


@dataclass(kw_only=True, slots=True)
class FewWorkers:
    """The workers that a local decision prices. Looks at a number of them that does not grow with the fleet."""

    membership: Membership
    own: OwnLoad
    random: Random

    def find(
        self,
        model: str,
        *,
        prompt_tokens: int,
        exclude: frozenset[str] = frozenset(),
        only: frozenset[str] | None = None,
        first_block: bytes | None = None,
        compat_hash: str | None = None,
        coming: Mapping[str, int] | None = None,
        absences: Mapping[str, Absence] | None = None,
    ) -> Found:
        """All that may be offered, of a small fleet; of a larger one those with a reason to be cheap. `only`: of these.

        `first_block`: digest of the prompt's first page, if it has one. `compat_hash`: of the workers that are wanted,
        if others are not. `coming`: prompt tokens that workers will have cached soon.
        `absences`: of workers that have to load the adapter.
        """

        known: dict[str, WorkerRecord | None] = {}
        candidate = self.membership.candidate

        def fitting(name: str) -> WorkerRecord | None:
            if name in known:
                return known[name]
            if only is not None and name not in only:
                return None
            found = known[name] = candidate(name, model, prompt_tokens=prompt_tokens, exclude=exclude)
            return found

        near = self._near(model, first_block, fitting)
        homes = frozenset(names[0] for names in near.values() if names)
        if only is None and self.membership.groups.size(model) > ALL_PRICED:
            names = {name for nearest in near.values() for name in nearest}
            names.update(sorted(coming or {}, key=lambda name: (-(coming or {})[name], name))[:NEAR])
            groups = self._groups(model, compat_hash)
            names.update(self._least_loaded(groups, fitting))
            if absences:
                present = ([n for n in group if n not in absences and fitting(n) is not None] for group in groups)
                names.update(self._least_loaded(present, fitting))
            records = [record for name in sorted(names) if (record := fitting(name)) is not None]
            if self.membership.groups.rings(model).keys() <= {record.view.role for record in records}:
                return Found(records, homes)
        # Of a large fleet: nearly all of some role are excluded.
        records = self.membership.candidates(model, prompt_tokens=prompt_tokens, exclude=exclude, only=only)
        by_role: dict[Role, list[WorkerRecord]] = {}
        for record in records:
            by_role.setdefault(record.view.role, []).append(record)
        some = (self.random.sample(each, min(MAX_PRICED, len(each))) for each in by_role.values())
        return Found([record for each in some for record in each], homes)

    def _near(
        self, model: str, first_block: bytes | None, fitting: Callable[[str], WorkerRecord | None]
    ) -> dict[Role, list[str]]:
        """By role, the first workers on its ring from the point of the block on."""
        if first_block is None:
            return {}
        return {
            role: [*islice(_distinct(ring.walk(first_block), fitting), NEAR)]
            for role, ring in self.membership.groups.rings(model).items()
        }

    def _groups(self, model: str, compat_hash: str | None) -> list[Sequence[str]]:
        """At most `MAX_GROUPS` of each role and compat hash."""
        groups = [
            names
            for (_, compat), names in self.membership.groups.groups(model).items()
            if compat_hash is None or compat == compat_hash
        ]
        return self.random.sample(groups, MAX_GROUPS) if len(groups) > MAX_GROUPS else groups

    def _least_loaded(
        self, groups: Iterable[Sequence[str]], fitting: Callable[[str], WorkerRecord | None]
    ) -> Iterable[str]:
        """The least loaded by own notes of some random ones of each group."""
        own, now = self.own, self.own.clock.now()
        for names in groups:
            records = [record for name in _some(names, self.random) if (record := fitting(name)) is not None]
            records.sort(key=lambda record: own.busy_s(record, now))
            for record in records[:LEAST]:
                yield record.view.incarnation


def _some(names: Sequence[str], random: Random) -> Iterable[str]:
    """`MET` different ones in random order, or all. `Random.sample` takes three times as long where they are many."""
    size = len(names)
    if size <= 4 * MET:
        return random.sample(names, min(MET, size))
    places: dict[int, None] = {}
    while len(places) < MET:
        places[int(random.random() * size)] = None
    return [names[place] for place in places]


def _distinct(names: Iterable[str], fitting: Callable[[str], WorkerRecord | None]) -> Iterator[str]:
    """Those of `names` that fit, each once; none beyond `MAX_WALKED`."""
    met = set[str]()
    for name in islice(names, MAX_WALKED):
        if name not in met:
            met.add(name)
            if fitting(name) is not None:
                yield name


@dataclass(kw_only=True, slots=True)
class LocalRouting:
    """Prices workers of the last view, as few as `FewWorkers` finds."""

    own: OwnLoad
    random: Random

    def choose(
        self,
        found: "Found",
        demand: Demand,
        in_flight: Mapping[str, int] | None = None,
        absences: Mapping[str, Absence] | None = None,
    ) -> Option | None:
        """The cheapest of `options`; None when there are none."""
        return cheapest(self.options(found, demand, in_flight, absences), self.random)

    def options(
        self,
        found: "Found",
        demand: Demand,
        in_flight: Mapping[str, int] | None = None,
        absences: Mapping[str, Absence] | None = None,
    ) -> list[Option]:
        """Empty when no record can decode.

        `in_flight`: prompt tokens that workers will have cached soon, by incarnation. `absences`: of workers that have
        to load the adapter.
        """
        coming, absent, now = in_flight or {}, absences or {}, self.own.clock.now()
        candidates = []
        for record in found.records:
            name = record.view.incarnation
            guessed = demand.prompt_tokens // 2 if name in found.homes else 0
            matched = max(guessed, min(coming.get(name, 0), demand.prompt_tokens))
            candidates.append(
                Candidate(
                    view=record.view,
                    load=self.own.load_of(record, now),
                    matched=matched,
                    in_flight=matched - guessed,
                    links=record.link_rates,
                    absence=absent.get(name, PRESENT),
                )
            )
        return options(candidates, demand, self.random)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalChoices:
    """Choices made from the local view of the fleet, without Redis."""

    routing: LocalRouting
    few: FewWorkers
    membership: Membership
    random: Random
    chains: LastChain
    in_flight: PromptsInFlight
    next_serial: Callable[[], int]

    async def choose(self, query: RouteQuery, demand: Demand, *, explained: bool) -> RouteDecision | None:
        """Nothing is reserved that others could see; None when no worker can take it."""
        page_size = self.membership.page_size(query.model) or 1
        chain = await self.chains.of(query.token_ids, page_size, space=query.space, most_blocks=MAX_CHAIN_BLOCKS)
        coming = {name: blocks * page_size for name, blocks in self.in_flight.matches(chain).items()}
        first_block, exclude = chain[0] if chain else None, query.exclude
        for _ in range(MAX_ASKED):
            found = self.few.find(
                query.model,
                prompt_tokens=demand.prompt_tokens,
                exclude=exclude,
                only=query.only,
                first_block=first_block,
                compat_hash=query.compat_hash,
                coming=coming,
                absences=query.absences,
            )
            options = self.routing.options(found, demand, coming, query.absences)
            option = cheapest(options, self.random)
            if option is None:
                return None
            ends = {option.decode.view.incarnation, option.computing.view.incarnation}
            unproven = await self.membership.unproven(ends)
            if not unproven:
                break
            exclude |= unproven
        else:
            return None
        serial, computing, terms = self.next_serial(), option.computing, option.terms
        find, prefill = self.membership.find, option.prefill
        if computing.view.page_size == page_size:
            self.in_flight.note(serial, chain, computing.view.incarnation, computed_in_s(terms))
        return RouteDecision(
            request_id=query.request_id,
            decode=option.decode.view,
            prefill=None if prefill is None else prefill.view,
            source=Source.LOCAL,
            placement=option.placement,
            terms=terms,
            matched_tokens=0,
            fetch=planned_fetch(computing, demand),
            priced=priced_options(options, option) if explained else None,
            latency=predicted_latency(
                terms,
                query,
                demand,
                decode=find(option.decode.view.incarnation),
                prefill=None if prefill is None else find(prefill.view.incarnation),
            ),
            reservation=Reservation(None, claims_of(option, demand), serial),
        )
