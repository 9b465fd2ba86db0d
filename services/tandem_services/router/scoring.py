"""Selects the cheapest worker or pair for a request by the cost model (`cost`), and plans prefix fetches. Pure.

`scripts/route.lua` and `scripts/fetch.lua` implement the same in Redis.

A pair is scored with the link between its two ends, so the best pair is not simply the best end of each list. All pairs
of the most promising ends are scored: enough to avoid a slow link, few enough that a decision costs the same in a large
fleet.

A prefix fetch is planned where it is cheaper than computing the prefix. Any worker with the same compat hash may be the
source, whatever its role: another prefill worker, or the decode worker that generated the last answer of the
conversation. Only the few with the longest matches are considered.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from tandem_engine.config import Role
from tandem_services.router import cost
from tandem_services.router.cost import Candidate, Demand, PricedFetch, shortlist
from tandem_services.router.decision import (
    EXPLAINED_OPTIONS,
    Placement,
    PlannedFetch,
    PricedOption,
    PricedOptions,
    PricedPrefix,
    ScoreTerm,
)

MIN_FETCH_TIMEOUT_S = 0.25

FETCH_TIMEOUT_FACTOR = 4
"""Times the predicted duration. A fetch times out when computing the prefix would have taken less time, but not after
a short delay."""


def with_fetches(members: Sequence[Candidate], demand: Demand, random: Random) -> list[Candidate]:
    """`members` of one compat hash, each with the fetch by which it computes the prompt for less, if there is any."""
    having = [member for member in members if member.held > 0]
    sources = shortlist(having, [-member.held for member in having], random)
    if not sources:
        return [*members]
    return [_with_fetch(member, sources, demand) for member in members]


def planned_fetch(computing: Candidate, demand: Demand) -> PlannedFetch | None:
    """The prefix fetch for the chosen worker, if it should fetch."""
    fetch = computing.fetch
    if fetch is None:
        return None
    uncached = cost.prefill_compute_s(computing.load, computing.matched, demand)
    saved = uncached - cost.prefill_compute_s(computing.load, fetch.tokens, demand)
    return PlannedFetch(
        source=fetch.source,
        tokens=fetch.tokens,
        seconds=fetch.seconds,
        within_s=max(MIN_FETCH_TIMEOUT_S, FETCH_TIMEOUT_FACTOR * fetch.seconds, saved),
    )


def _with_fetch(member: Candidate, sources: Sequence[Candidate], demand: Demand) -> Candidate:
    fetch = _cheapest(member, sources, demand)
    return member if fetch is None else replace(member, fetch=fetch)


def _cheapest(member: Candidate, sources: Sequence[Candidate], demand: Demand) -> PricedFetch | None:
    best, least = None, _compute_s(member, member.matched, demand)
    for source in sources:
        tokens = source.held - member.matched
        if source is member or tokens <= 0:
            continue
        token_seconds = cost.token_s(source.load, source.links.get(member.view.incarnation))
        seconds = cost.fetch_s(source.load, token_seconds, tokens)
        price = cost.fetch_wait_s(seconds, member.load) + _compute_s(member, source.held, demand)
        if price < least:
            best, least = PricedFetch(source=source.view, tokens=source.held, seconds=seconds), price
    return best


def _compute_s(member: Candidate, known: int, demand: Demand) -> float:
    """If it fetches what it lacks of `known` tokens. Without its queue, which is the same whatever it fetches."""
    compute = cost.prefill_compute_s(member.load, known, demand)
    stall = cost.prefill_stall_s(member.load, member.view.role, known, demand)
    return compute + stall + cost.copy_s(member.load, known - member.matched)


TIE_S = 1e-4
"""Prices closer than this are equal: measured rates are not that precise. Ties break at random."""

DECODE_ROOM = "decode_room"
"""Name of the term that `NO_ROOM_S` goes into."""

PREFILL_QUEUE = "prefill_queue"
BEFORE_COMPUTED = frozenset({"prefix_fetch", "host_load", PREFILL_QUEUE, "prefill_compute"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A decode worker alone, or a pair."""

    decode: Candidate
    prefill: Candidate | None = None
    degraded: bool = False
    """A decode worker computes the prompt because no prefill worker can."""
    terms: tuple[ScoreTerm, ...]

    @property
    def cost(self) -> float:
        return sum(term.seconds for term in self.terms)

    @property
    def computing(self) -> Candidate:
        """The worker that computes the prompt."""
        return self.decode if self.prefill is None else self.prefill

    @property
    def placement(self) -> Placement:
        return placement_of(self.decode.view.role, paired=self.prefill is not None, degraded=self.degraded)


@dataclass(slots=True)
class _Group:
    """Workers of one compat hash. A worker that does both is in both lists."""

    prefills: list[Candidate] = field(default_factory=list)
    decodes: list[Candidate] = field(default_factory=list)


def placement_of(decode: Role, *, paired: bool, degraded: bool) -> Placement:
    """What a choice is called; `decode` is the role of its decode worker."""
    if paired:
        return Placement.PAIR
    if decode is Role.BOTH:
        return Placement.ALONE
    return Placement.DEGRADED if degraded else Placement.LOCAL


def select(candidates: Iterable[Candidate], demand: Demand, random: Random) -> Option | None:
    """The cheapest option, ties at random; None when no candidate can decode."""
    return cheapest(options(candidates, demand, random), random)


def cheapest(found: Sequence[Option], random: Random) -> Option | None:
    """The cheapest option, at random among those of equal cost; None if there is no option."""
    if not found:
        return None
    costs = [option.cost for option in found]
    best = min(costs)
    return random.choice([option for option, cost in zip(found, costs, strict=True) if cost <= best + TIE_S])


def priced_options(found: Sequence[Option], chosen: Option) -> PricedOptions:
    """`found`, as explain shows them."""
    others = sorted((option for option in found if option is not chosen), key=lambda option: option.cost)
    explained = (chosen, *others[: EXPLAINED_OPTIONS - 1])
    return PricedOptions(options=tuple(_priced(option) for option in explained), more=len(found) - len(explained))


def options(candidates: Iterable[Candidate], demand: Demand, random: Random) -> list[Option]:
    """Every decode worker that may serve alone, and the pairs of the most promising ends of each compat hash."""
    found = []
    groups = _by_compat(candidates, demand, random).values()
    any_whole = any(group.prefills and group.decodes for group in groups)
    for group in groups:
        for decode in group.decodes:
            if _may_serve_alone(decode, group, demand, any_whole=any_whole):
                degraded = not group.prefills
                found.append(Option(decode=decode, degraded=degraded, terms=_terms(decode, None, decode, demand)))
        found += _pairs(group, demand, random)
    return found


def has_to_wait(terms: Iterable[ScoreTerm]) -> bool:
    """Whether the decode worker of an option with this price has no room for it now."""
    return [term.seconds for term in terms if term.name == DECODE_ROOM and term.seconds > 0.0] != []


def prefill_wait_s(terms: Iterable[ScoreTerm]) -> float:
    """How long its prompt is predicted to wait for the prompts before it."""
    waits = [term.seconds for term in terms if term.name == PREFILL_QUEUE]
    return waits[0] if len(waits) == 1 else sum(waits)


def computed_in_s(terms: Iterable[ScoreTerm]) -> float:
    """Until the prompt is computed, with what has to happen before."""
    return sum(term.seconds for term in terms if term.name in BEFORE_COMPUTED)


def _pairs(group: _Group, demand: Demand, random: Random) -> Iterable[Option]:
    if not group.prefills or not group.decodes:
        return
    least = cost.uncached(max(each.held for each in (*group.prefills, *group.decodes)), demand)
    prefills = shortlist(
        group.prefills,
        [sum(_prefill(c, demand)) + least * cost.token_s(c.load, None) for c in group.prefills],
        random,
    )
    typical = min(cost.token_s(prefill.load, None) for prefill in prefills)
    decodes = shortlist(
        group.decodes,
        [
            sum(_decode(c, demand))
            + cost.transfer_s(typical, c.matched, demand)
            + cost.absent_adapter_s(c.absence, 0.0)
            for c in group.decodes
        ],
        random,
    )
    for prefill in prefills:
        for decode in decodes:
            # The same worker at both ends is "alone" with a transfer added, and "alone" is on the list.
            if prefill is not decode:
                rate = prefill.links.get(decode.view.incarnation)
                token_seconds = cost.token_s(prefill.load, rate)
                yield Option(decode=decode, prefill=prefill, terms=_terms(prefill, token_seconds, decode, demand))


def _by_compat(candidates: Iterable[Candidate], demand: Demand, random: Random) -> dict[str, _Group]:
    alike: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        alike[candidate.view.compat_hash].append(candidate)
    return {compat: _group(with_fetches(members, demand, random)) for compat, members in alike.items()}


def _group(members: Iterable[Candidate]) -> _Group:
    group = _Group()
    for member in members:
        if member.view.role is not Role.DECODE:
            group.prefills.append(member)
        if member.view.role is not Role.PREFILL:
            group.decodes.append(member)
    return group


def _may_serve_alone(decode: Candidate, group: _Group, demand: Demand, *, any_whole: bool) -> bool:
    """A decode worker computes the prompt itself when no more than that is missing, or when no other worker could.

    One that no prefill worker can hand to, while others have prefill workers (`any_whole`), differs from the rest of
    the fleet: by its weights, perhaps. It waits for its kind instead of answering in its own way [same-kind-paired].
    """
    if decode.view.role is Role.BOTH or not any_whole:
        return True
    allowed = demand.local_prefill_tokens
    return bool(group.prefills) and 0 < cost.uncached(decode.matched, demand) <= allowed


def _prefill(candidate: Candidate, demand: Demand) -> tuple[float, float, float, float, float, float]:
    load, known, role = candidate.load, candidate.known, candidate.view.role
    copying = cost.host_load_s(load, candidate.in_host)
    stall = cost.prefill_stall_s(load, role, known, demand) + copying * cost.waiting_sequences(load, role)
    queue = cost.prefill_queue_s(load)
    return (
        0.0 if candidate.fetch is None else cost.fetch_wait_s(candidate.fetch.seconds, load),
        copying,
        queue,
        cost.prefill_compute_s(load, known, demand),
        stall + cost.copy_s(load, candidate.fetched),
        cost.absent_adapter_s(candidate.absence, queue),
    )


def _decode(candidate: Candidate, demand: Demand) -> tuple[float, float]:
    return cost.decode_load_s(candidate.load), cost.decode_room_s(candidate.load, demand)


def _at_decode_end(computing: Candidate, decode: Candidate, demand: Demand) -> float:
    """Of a pair: what the decode worker's load of the adapter adds to what happens before its turn."""
    if decode.absence is cost.PRESENT:
        return 0.0
    hidden = cost.prefill_queue_s(computing.load) + cost.prefill_compute_s(computing.load, computing.known, demand)
    return cost.absent_adapter_s(decode.absence, hidden)


def _terms(
    computing: Candidate, token_seconds: float | None, decode: Candidate, demand: Demand
) -> tuple[ScoreTerm, ...]:
    """`token_seconds`: of the link between the two; None when there is nothing to move."""
    fetch, copying, queue, compute, stall, absent = _prefill(computing, demand)
    load, room = _decode(decode, demand)
    if computing is not decode:
        absent += _at_decode_end(computing, decode, demand)
    transfer = 0.0 if token_seconds is None else cost.transfer_s(token_seconds, decode.matched, demand)
    return (
        ScoreTerm("prefix_fetch", fetch),
        ScoreTerm("host_load", copying),
        ScoreTerm(PREFILL_QUEUE, queue),
        ScoreTerm("prefill_compute", compute),
        ScoreTerm("prefill_stall", stall),
        ScoreTerm("adapter_load", absent),
        ScoreTerm("transfer", transfer),
        ScoreTerm("decode_load", load),
        ScoreTerm(DECODE_ROOM, room),
    )


def _priced(option: Option) -> PricedOption:
    fetch = option.computing.fetch
    return PricedOption(
        decode=option.decode.view.incarnation,
        prefill=None if option.prefill is None else option.prefill.view.incarnation,
        predicted_s=option.cost,
        terms=option.terms,
        matched_tokens=option.computing.matched,
        matched_host_tokens=option.computing.in_host,
        decode_matched_tokens=option.decode.matched,
        decode_matched_host_tokens=option.decode.in_host,
        fetch=None if fetch is None else PricedPrefix(fetch.source.incarnation, fetch.tokens, fetch.seconds),
    )
