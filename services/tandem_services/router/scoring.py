"""The price of a choice, in seconds: the formula of `scripts/score.lua` in Python.

Redis decides with the Lua twin; the local fallback uses this one, and a property test holds the two together.

    prefill_queue    (tokens queued + reserved) / prefill rate
    prefill_compute  uncached prompt tokens / prefill rate; at least one token is always computed
    transfer         handoff messages + KV bytes of the prompt that the decode worker lacks / transfer rate
    decode_load      (sequences there + reserved) × step time: what one more sequence costs its neighbours
    decode_room      NO_ROOM_S when the sequence would have to wait for others to end

A pair costs what its two ends cost, so the best pair is the best prefill end and the best decode end among
workers of one compat hash.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from tandem_engine.config import Role
from tandem_services.router.choice import ScoreTerm, WorkerView

ASSUMED_PREFILL_RATE = 2_000.0
"""Tokens per second of a worker that has published no rate: a slow one, so that it is tried but not flooded."""

ASSUMED_TRANSFER_RATE = 1e9
"""Bytes per second between two workers that have published none: a plain 10 Gbit/s network."""

HANDOFF_S = 0.002
"""Grant, handoff record and commit of one transfer, whatever its size. Keeps a worker that can do both from
handing over for nothing."""

NO_ROOM_S = 5.0
"""Assumed wait for running sequences to end. Large against any other term, so that a worker with room is
preferred, and finite, so that the choice among full workers is still by price."""

TIE_S = 1e-4
"""Prices closer than this are equal: measured rates are not that precise. Ties break at random."""

DECODE_ROOM = "decode_room"
"""Name of the term that `NO_ROOM_S` goes into."""

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class Load:
    """What one worker has to do: its own report plus what was reserved since."""

    queue_tokens: float = 0.0
    prefill_rate: float = ASSUMED_PREFILL_RATE
    sequences: float = 0.0
    step_s: float = 0.0
    room_tokens: float = 0.0
    max_sequences: float = 1.0
    token_bytes: float = 0.0
    transfer_rate: float = ASSUMED_TRANSFER_RATE


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What one request asks for."""

    prompt_tokens: int
    output_tokens: int
    """Output tokens to keep room for."""
    local_prefill_tokens: int
    """A decode worker that has the beginning of a prompt may compute the rest alone when that is no more than this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One worker as the formula sees it."""

    view: WorkerView
    load: Load
    matched: int
    """Prompt tokens in its prefix cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A decode worker alone, or a pair."""

    decode: Candidate
    prefill: Candidate | None = None
    terms: tuple[ScoreTerm, ...]

    @property
    def cost(self) -> float:
        return sum(term.seconds for term in self.terms)

    @property
    def computing(self) -> Candidate:
        """Who computes the prompt."""
        return self.decode if self.prefill is None else self.prefill


@dataclass(slots=True)
class _Group:
    """Workers of one compat hash. A worker that does both is in both lists."""

    prefills: list[Candidate] = field(default_factory=list)
    decodes: list[Candidate] = field(default_factory=list)


def select(candidates: Iterable[Candidate], demand: Demand, random: Random) -> Option | None:
    """The cheapest option, ties at random; None when no candidate can decode."""
    found = options(candidates, demand, random)
    return _cheapest(found, [option.cost for option in found], random) if found else None


def options(candidates: Iterable[Candidate], demand: Demand, random: Random) -> list[Option]:
    """Every decode worker that may serve alone, and the best pair of each compat hash."""
    found = []
    for group in _by_compat(candidates).values():
        for decode in group.decodes:
            if _may_serve_alone(decode, group, demand):
                found.append(Option(decode=decode, terms=_alone_terms(decode, demand)))
        if group.prefills and group.decodes:
            prefill = _cheapest(group.prefills, [sum(_prefill(c, demand)) for c in group.prefills], random)
            decode = _cheapest(group.decodes, [_receiving(c, demand) for c in group.decodes], random)
            # The same worker at both ends is "alone" with a transfer added, and "alone" is on the list.
            if prefill is not decode:
                found.append(Option(decode=decode, prefill=prefill, terms=_pair_terms(prefill, decode, demand)))
    return found


def room_needed(demand: Demand) -> int:
    """Token slots a decode worker needs to take the request."""
    return demand.prompt_tokens + demand.output_tokens


def has_to_wait(terms: Iterable[ScoreTerm]) -> bool:
    """Whether the decode worker of an option with this price has no room for it now."""
    return any(term.name == DECODE_ROOM and term.seconds > 0.0 for term in terms)


def uncached(candidate: Candidate, demand: Demand) -> int:
    """Prompt tokens that `candidate` would compute."""
    return max(1, demand.prompt_tokens - candidate.matched)


def _by_compat(candidates: Iterable[Candidate]) -> dict[str, _Group]:
    groups: dict[str, _Group] = defaultdict(_Group)
    for candidate in candidates:
        group = groups[candidate.view.compat_hash]
        if candidate.view.role is not Role.DECODE:
            group.prefills.append(candidate)
        if candidate.view.role is not Role.PREFILL:
            group.decodes.append(candidate)
    return groups


def _may_serve_alone(decode: Candidate, group: _Group, demand: Demand) -> bool:
    return (
        decode.view.role is Role.BOTH
        or not group.prefills
        or (decode.matched > 0 and demand.prompt_tokens - decode.matched <= demand.local_prefill_tokens)
    )


def _prefill(candidate: Candidate, demand: Demand) -> tuple[float, float]:
    load = candidate.load
    return load.queue_tokens / load.prefill_rate, uncached(candidate, demand) / load.prefill_rate


def _transfer(candidate: Candidate, demand: Demand) -> float:
    lacking = max(0, demand.prompt_tokens - candidate.matched)
    return HANDOFF_S + lacking * candidate.load.token_bytes / candidate.load.transfer_rate


def _decode(candidate: Candidate, demand: Demand) -> tuple[float, float]:
    load = candidate.load
    full = load.sequences >= load.max_sequences or room_needed(demand) > load.room_tokens
    return load.sequences * load.step_s, NO_ROOM_S if full else 0.0


def _receiving(candidate: Candidate, demand: Demand) -> float:
    return _transfer(candidate, demand) + sum(_decode(candidate, demand))


def _alone_terms(decode: Candidate, demand: Demand) -> tuple[ScoreTerm, ...]:
    return _terms(_prefill(decode, demand), 0.0, _decode(decode, demand))


def _pair_terms(prefill: Candidate, decode: Candidate, demand: Demand) -> tuple[ScoreTerm, ...]:
    return _terms(_prefill(prefill, demand), _transfer(decode, demand), _decode(decode, demand))


def _terms(prefill: tuple[float, float], transfer: float, decode: tuple[float, float]) -> tuple[ScoreTerm, ...]:
    return (
        ScoreTerm("prefill_queue", prefill[0]),
        ScoreTerm("prefill_compute", prefill[1]),
        ScoreTerm("transfer", transfer),
        ScoreTerm("decode_load", decode[0]),
        ScoreTerm(DECODE_ROOM, decode[1]),
    )


def _cheapest(entries: Sequence[T], costs: Sequence[float], random: Random) -> T:
    best = min(costs)
    return random.choice([entry for entry, cost in zip(entries, costs, strict=True) if cost <= best + TIE_S])
