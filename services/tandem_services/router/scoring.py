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
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from msgspec import Struct, structs

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
    sources = _sources(members, random)
    return [_with_fetch(member, sources, demand) for member in members] if sources else [*members]


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


class _FetchSource(NamedTuple):
    """A worker that others of its compat hash may fetch a prefix from."""

    member: Candidate
    held: int
    overhead_s: float
    """Of a fetch of any size."""


def _sources(members: Sequence[Candidate], random: Random) -> list[_FetchSource]:
    having = [member for member in members if member.held > 0]
    chosen = shortlist(having, [-member.held for member in having], random)
    return [_FetchSource(each, each.held, cost.fetch_overhead_s(each.load)) for each in chosen]


def _with_fetch(member: Candidate, sources: Sequence[_FetchSource], demand: Demand) -> Candidate:
    fetch = _cheapest(member, sources, demand)
    return member if fetch is None else structs.replace(member, fetch=fetch)


def _cheapest(member: Candidate, sources: Sequence[_FetchSource], demand: Demand) -> PricedFetch | None:
    load, matched = member.load, member.matched
    if all(source.held <= matched for source in sources):
        return None
    waiting, queue_s = cost.waiting_sequences(load, member.view.role), cost.prefill_queue_s(load)

    def compute_s(known: int) -> float:
        """If it fetches what it lacks of `known` tokens. Without its queue, which is the same whatever it fetches."""
        compute = cost.prefill_compute_s(load, known, demand)
        return compute + compute * waiting + cost.copy_s(load, known - matched)

    best, least = None, compute_s(matched)
    for source, held, overhead_s in sources:
        tokens = held - matched
        if source is member or tokens <= 0:
            continue
        token_seconds = cost.token_s(source.load, source.links.get(member.view.incarnation))
        seconds = overhead_s + tokens * token_seconds
        price = max(0.0, seconds - queue_s) + compute_s(held)
        if price < least:
            best, least = PricedFetch(source=source.view, tokens=held, seconds=seconds), price
    return best


TIE_S = 1e-4
"""Prices closer than this are equal: measured rates are not that precise. Ties break at random."""

DECODE_ROOM = "decode_room"
"""Name of the term that `NO_ROOM_S` goes into."""

PREFILL_QUEUE = "prefill_queue"
BEFORE_COMPUTED = frozenset({"prefix_fetch", "host_load", PREFILL_QUEUE, "prefill_compute"})


TERMS = (
    "prefix_fetch",
    "host_load",
    PREFILL_QUEUE,
    "prefill_compute",
    "prefill_stall",
    "adapter_load",
    "transfer",
    "decode_load",
    DECODE_ROOM,
)
"""Names of the terms of a price (`cost`), in the order in which they are added."""


class Option(Struct, frozen=True, kw_only=True):
    """A decode worker alone, or a pair. A decision prices some twenty and returns one: names are given to the terms of
    that one."""

    decode: Candidate
    prefill: Candidate | None = None
    degraded: bool = False
    """A decode worker computes the prompt because no prefill worker can."""
    seconds: tuple[float, ...]
    """Of `TERMS`."""

    @property
    def terms(self) -> tuple[ScoreTerm, ...]:
        return tuple(map(ScoreTerm, TERMS, self.seconds))

    @property
    def cost(self) -> float:
        return sum(self.seconds)

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

    members: list[Candidate] = field(default_factory=list)
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
    costs = [sum(option.seconds) for option in found]
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
    groups = _by_compat(candidates).values()
    any_whole = any(group.prefills and group.decodes for group in groups)
    fetched = [_sources(group.members, random) for group in groups]
    for group, sources in zip(groups, fetched, strict=True):
        ends = {each.view.incarnation: _priced_end(each, sources, demand) for each in group.prefills}
        for decode in group.decodes:
            if _may_serve_alone(decode, group, demand, any_whole=any_whole):
                alone, before = ends.get(decode.view.incarnation) or _priced_end(decode, sources, demand)
                seconds = (*before, 0.0, *_decode(alone, demand))
                found.append(Option(decode=alone, degraded=not group.prefills, seconds=seconds))
        found += _pairs(group, [*ends.values()], demand, random)
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


class _End(NamedTuple):
    """A worker that may compute the prompt, priced once for all its options."""

    worker: Candidate
    seconds: tuple[float, float, float, float, float, float]
    """`_prefill`."""


def _priced_end(member: Candidate, sources: Sequence[_FetchSource], demand: Demand) -> _End:
    worker = _with_fetch(member, sources, demand)
    return _End(worker, _prefill(worker, demand))


def _pairs(group: _Group, ends: Sequence[_End], demand: Demand, random: Random) -> Iterable[Option]:
    if not group.prefills or not group.decodes:
        return
    least = cost.uncached(max(each.held for each in group.members), demand)
    prefills = shortlist(ends, [sum(end.seconds) + least * cost.token_s(end.worker.load, None) for end in ends], random)
    typical = min(cost.token_s(end.worker.load, None) for end in prefills)
    loads = [_decode(each, demand) for each in group.decodes]
    decodes = shortlist(
        [*zip(group.decodes, loads, strict=True)],
        [
            sum(load) + cost.transfer_s(typical, each.matched, demand) + cost.absent_adapter_s(each.absence, 0.0)
            for each, load in zip(group.decodes, loads, strict=True)
        ],
        random,
    )
    for prefill, (fetch, copying, queue, compute, stall, absent) in prefills:
        name, load, links = prefill.view.incarnation, prefill.load, prefill.links
        for decode, (load_s, room_s) in decodes:
            # The same worker at both ends is "alone" with a transfer added, and "alone" is on the list.
            if name == decode.view.incarnation:
                continue
            loading = absent
            if decode.absence is not cost.PRESENT:
                loading += cost.absent_adapter_s(decode.absence, queue + compute)
            transfer = cost.transfer_s(cost.token_s(load, links.get(decode.view.incarnation)), decode.matched, demand)
            yield Option(
                decode=decode,
                prefill=prefill,
                seconds=(fetch, copying, queue, compute, stall, loading, transfer, load_s, room_s),
            )


def _by_compat(candidates: Iterable[Candidate]) -> dict[str, _Group]:
    groups: dict[str, _Group] = defaultdict(_Group)
    for candidate in candidates:
        group, role = groups[candidate.view.compat_hash], candidate.view.role
        group.members.append(candidate)
        if role is not Role.DECODE:
            group.prefills.append(candidate)
        if role is not Role.PREFILL:
            group.decodes.append(candidate)
    return groups


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
    """The first of `TERMS`, of the worker that computes the prompt."""
    load, known, role = candidate.load, candidate.known, candidate.view.role
    copying, waiting = cost.host_load_s(load, candidate.in_host), cost.waiting_sequences(load, role)
    compute, queue = cost.prefill_compute_s(load, known, demand), cost.prefill_queue_s(load)
    return (
        0.0 if candidate.fetch is None else cost.fetch_wait_s(candidate.fetch.seconds, load),
        copying,
        queue,
        compute,
        compute * waiting + copying * waiting + cost.copy_s(load, known - candidate.matched),
        0.0 if candidate.absence is cost.PRESENT else cost.absent_adapter_s(candidate.absence, queue),
    )


def _decode(candidate: Candidate, demand: Demand) -> tuple[float, float]:
    """The last of `TERMS`."""
    return cost.decode_load_s(candidate.load), cost.decode_room_s(candidate.load, demand)


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
