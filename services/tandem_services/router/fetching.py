"""Which worker would better fetch a prefix than compute it, and from whom. `scripts/fetch.lua` does the same in Redis.

Any worker of the same compat hash may have the prefix, whatever its role: another prefill worker, or the decode worker
that generated the conversation's last answer. The few with the longest matches are looked at.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from tandem_services.router import cost
from tandem_services.router.candidate import Candidate, PricedFetch
from tandem_services.router.choice import PlannedFetch
from tandem_services.router.cost import Demand
from tandem_services.router.shortlist import shortlist

LEAST_PATIENCE_S = 0.25
PATIENCE = 4
"""Times the prediction. Waiting is given up when the prefix could have been computed by then, but not for a hiccup."""


def with_fetches(members: Sequence[Candidate], demand: Demand, random: Random) -> list[Candidate]:
    """`members` of one compat hash, each with the fetch by which it computes the prompt for less, if there is any."""
    having = [member for member in members if member.held > 0]
    sources = shortlist(having, [-member.held for member in having], random)
    return [replace(member, fetch=_cheapest(member, sources, demand)) for member in members]


def planned_fetch(computing: Candidate, demand: Demand) -> PlannedFetch | None:
    """What the chosen worker is told, if it had better fetch."""
    fetch = computing.fetch
    if fetch is None:
        return None
    uncached = cost.prefill_compute_s(computing.load, computing.matched, demand)
    saved = uncached - cost.prefill_compute_s(computing.load, fetch.tokens, demand)
    return PlannedFetch(
        source=fetch.source,
        tokens=fetch.tokens,
        seconds=fetch.seconds,
        within_s=max(LEAST_PATIENCE_S, PATIENCE * fetch.seconds, saved),
    )


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
