"""The Lua decision and the Python formula against the plainest possible model of both."""

import asyncio
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tandem_engine.config import Role
from tandem_engine.messages.stats import LinkReport
from tandem_services.router.cost import (
    BROKEN_TOKEN_S,
    COPY_FOLLOWERS,
    FETCH_S,
    FETCH_TURNS,
    FOLLOWERS,
    HANDOFF_S,
    NO_ROOM_S,
    PAIR_ENDS,
    PRESENT,
    TURN_TOKENS,
    Candidate,
    Demand,
    Load,
)
from tandem_services.router.decision import EXPLAINED_OPTIONS, Absence, PricedOptions
from tandem_services.router.registry import WorkerRecord
from tandem_services.router.scoring import TIE_S, cheapest, options, priced_options
from tandem_testing.long_tests import examples
from tandem_testing.redis_server import REDIS_SERVER, RedisServer
from tandem_testing.router_builders import LASTING, MODEL, PAGE, Fleet, chain_of, make_record

pytestmark = pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")

PROMPT = tuple(range(1000))
CHAIN = chain_of(PROMPT)
DEMAND = Demand(prompt_tokens=len(PROMPT), output_tokens=64, local_prefill_tokens=16)


@pytest.fixture(scope="module")
def server():
    process = RedisServer.start()
    yield process
    process.stop()


@dataclass(frozen=True)
class Member:
    record: WorkerRecord
    blocks: int
    in_host: int
    """Of the blocks, the last so many."""
    absence: Absence = PRESENT
    """Of the request's adapter."""

    @property
    def matched(self) -> int:
        return min(self.blocks * PAGE, len(PROMPT))

    @property
    def host_tokens(self) -> int:
        return self.matched - min((self.blocks - self.in_host) * PAGE, len(PROMPT))


loads = st.builds(
    Load,
    queue_tokens=st.integers(0, 5000),
    prefill_rate=st.sampled_from([100.0, 1000.0, 20_000.0]),
    sequences=st.integers(0, 70),
    step_s=st.sampled_from([0.0, 0.005, 0.05]),
    room_tokens=st.sampled_from([0, 1063, 1064, 100_000]),
    max_sequences=st.sampled_from([1, 64]),
    token_bytes=st.sampled_from([0.0, 1e5]),
    transfer_rate=st.sampled_from([1e8, 1e10]),
    host_token_s=st.sampled_from([0.0, 0.0, 1e-5, 1e-2]),
)


links = st.lists(
    st.builds(
        LinkReport,
        peer=st.sampled_from([f"w{number}@1" for number in range(6)]),
        bytes_per_s=st.sampled_from([0.0, 1e6, 1e9]),
        broken=st.sampled_from([False, False, True]),
    ),
    max_size=4,
    unique_by=lambda link: link.peer,
).map(tuple)


absences = st.sampled_from([PRESENT, PRESENT, Absence(0.01, 0.0), Absence(0.5, 0.0), Absence(0.05, 0.2)])


@st.composite
def fleets(draw: st.DrawFn) -> list[Member]:
    fleet = []
    for number in range(draw(st.integers(1, 6))):
        record = make_record(
            f"w{number}",
            draw(st.sampled_from(Role)),
            load=draw(loads),
            links=draw(links),
            compat_hash=draw(st.sampled_from(["a", "b"])),
        )
        blocks = draw(st.sampled_from([0, 0, 1, 2, 30, 61, len(CHAIN)]))
        in_host = draw(st.sampled_from([0, 0, 1, blocks // 2, blocks])) if blocks else 0
        fleet.append(Member(record, blocks, in_host, draw(absences)))
    return fleet


def computing_s(computing: Member, source: Member | None) -> float:
    """Queue, fetch from `source` if there is one, and computing the rest, with those that wait in that time."""
    load, role = computing.record.load, computing.record.view.role
    waiting = {Role.PREFILL: 0, Role.DECODE: load.sequences + 1}.get(role, load.sequences)
    missing = max(1, len(PROMPT) - (source or computing).matched)
    work = missing * (1 + waiting + FOLLOWERS)
    ready = load.queue_tokens / load.prefill_rate
    copying = computing.host_tokens * load.host_token_s * (1 + waiting + FOLLOWERS)
    if source is not None:
        there = source.record.load
        turn = min(there.queue_tokens, TURN_TOKENS) / there.prefill_rate + (there.step_s if there.sequences else 0.0)
        lacking = source.matched - computing.matched
        moving = lacking * moving_s(source, computing)
        ready = max(ready, FETCH_S + FETCH_TURNS * turn + moving)
        work += lacking * COPY_FOLLOWERS
    return ready + copying + work / load.prefill_rate


def sources(fleet: list[Member], computing: Member) -> list[Member]:
    """Workers with more of the prompt than `computing`, of those with the longest matches."""
    alike = (m for m in fleet if m.record.view.compat_hash == computing.record.view.compat_hash)
    longest = sorted((m for m in alike if m.matched), key=lambda m: -m.matched)
    assume(len(longest) <= PAIR_ENDS or longest[PAIR_ENDS - 1].matched > longest[PAIR_ENDS].matched)
    return [m for m in longest[:PAIR_ENDS] if m.matched > computing.matched]


def cost(fleet: list[Member], prefill: Member | None, decode: Member) -> float | None:
    """Price of a choice by the definition of docs/routing.md; None when it is not allowed."""
    computing, load = prefill or decode, decode.record.load
    source = min((None, *sources(fleet, computing)), key=lambda source: computing_s(computing, source))
    seconds = computing_s(computing, source)
    queue_s = computing.record.load.queue_tokens / computing.record.load.prefill_rate
    seconds += max(0.0, computing.absence.load_s - queue_s) + computing.absence.evict_s
    if prefill is not None:
        missing = max(1, len(PROMPT) - (source or computing).matched)
        passing_s = queue_s + missing / computing.record.load.prefill_rate
        seconds += max(0.0, decode.absence.load_s - passing_s) + decode.absence.evict_s
    seconds += load.sequences * load.step_s
    if load.sequences >= load.max_sequences or DEMAND.prompt_tokens + DEMAND.output_tokens > load.room_tokens:
        seconds += NO_ROOM_S
    if prefill is not None:
        seconds += HANDOFF_S + max(1, len(PROMPT) - decode.matched) * moving_s(prefill, decode)
    return seconds


def moving_s(prefill: Member, decode: Member) -> float:
    """Seconds per token by the writer's figure for this link, or by that for its links in general."""
    load = prefill.record.load
    link = next((each for each in prefill.record.links if each.peer == decode.record.view.incarnation), None)
    if link is not None and link.broken:
        return BROKEN_TOKEN_S
    rate = link.bytes_per_s if link is not None and link.bytes_per_s else load.transfer_rate
    return min(load.token_bytes / rate, BROKEN_TOKEN_S)


def ends(fleet: list[Member], like: Member, other: Role) -> list[Member]:
    """Workers of the kind of `like` whose role is not `other`."""
    alike = (m for m in fleet if m.record.view.compat_hash == like.record.view.compat_hash)
    return [m for m in alike if m.record.view.role is not other]


def allowed(fleet: list[Member]) -> dict[tuple[str | None, str], float]:
    """Every choice that may be made, with its price."""
    found = {}
    whole = any(ends(fleet, of, Role.DECODE) and ends(fleet, of, Role.PREFILL) for of in fleet)
    for decode in fleet:
        view = decode.record.view
        if view.role is Role.PREFILL:
            continue
        prefills = ends(fleet, decode, Role.DECODE)
        little = max(1, len(PROMPT) - decode.matched) <= DEMAND.local_prefill_tokens
        if view.role is Role.BOTH or not whole or (prefills and little):
            found[None, view.incarnation] = cost(fleet, None, decode)
        for prefill in prefills:
            if prefill is not decode:
                found[prefill.record.view.incarnation, view.incarnation] = cost(fleet, prefill, decode)
    return found


@given(fleet=fleets(), seed=st.integers(0, 2**31 - 1), explained=st.booleans())
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_redis_makes_the_cheapest_allowed_choice_and_explains_it(server, fleet, seed, explained):
    expected = allowed(fleet)

    async def decide():
        server.command("FLUSHALL")
        workers = Fleet(server, **LASTING)
        for member in fleet:
            await workers.beat(member.record)
            await workers.cache(member.record, CHAIN[: member.blocks], in_host=member.in_host)
        routed = await workers.index.route(
            model=MODEL,
            demand=DEMAND,
            page_size=PAGE,
            chain=b"".join(CHAIN),
            exclude=frozenset(),
            absences={m.record.view.incarnation: m.absence for m in fleet if m.absence is not PRESENT},
            seed=seed,
            explained=explained,
        )
        await workers.close()
        return routed

    routed = asyncio.run(decide())
    if not expected:
        assert routed is None
        return
    assert routed is not None
    choice = (routed.prefill, routed.decode)
    assert choice in expected, f"{choice} is not allowed"
    assert expected[choice] <= min(expected.values()) + 3 * TIE_S
    assert sum(term.seconds for term in routed.terms) == pytest.approx(expected[choice], abs=1e-6)
    computing = {m.record.view.incarnation: m for m in fleet}[routed.prefill or routed.decode]
    assert routed.matched_tokens == computing.matched
    if routed.fetch is not None:
        source = {m.record.view.incarnation: m for m in fleet}[routed.fetch.source]
        assert routed.fetch.tokens == source.matched > computing.matched
        assert computing_s(computing, source) < computing_s(computing, None)
    check_explained(routed.priced, choice, expected, explained=explained)
    check_tiers(routed.priced, fleet)


def check_tiers(priced: PricedOptions | None, fleet: list[Member]) -> None:
    """Of every option it is explained how much of its match is in host memory alone, at either end."""
    members = {member.record.view.incarnation: member for member in fleet}
    for option in () if priced is None else priced.options:
        computing, decode = members[option.prefill or option.decode], members[option.decode]
        assert (option.matched_tokens, option.matched_host_tokens) == (computing.matched, computing.host_tokens)
        assert (option.decode_matched_tokens, option.decode_matched_host_tokens) == (decode.matched, decode.host_tokens)


def check_explained(
    priced: PricedOptions | None, chosen: tuple[str | None, str], expected: dict, *, explained: bool
) -> None:
    """What is explained is the choice and other allowed ones, each with its price, the cheapest first."""
    assert (priced is not None) is explained
    if priced is None:
        return
    assert (priced.options[0].prefill, priced.options[0].decode) == chosen
    others = [(option.prefill, option.decode) for option in priced.options[1:]]
    assert len({chosen, *others}) == 1 + len(others) <= EXPLAINED_OPTIONS
    for option in priced.options:
        assert option.predicted_s == pytest.approx(expected[option.prefill, option.decode], abs=1e-6)
        assert option.predicted_s == pytest.approx(sum(term.seconds for term in option.terms))
    prices = [option.predicted_s for option in priced.options[1:]]
    assert prices == sorted(prices)
    assert len(priced.options) + priced.more <= len(expected)
    assert priced.more == 0 or len(priced.options) == EXPLAINED_OPTIONS


@given(fleet=fleets(), seed=st.integers())
@settings(max_examples=examples(100), deadline=None)
def test_local_formula_makes_the_cheapest_allowed_choice(fleet, seed):
    expected = allowed(fleet)
    candidates = [
        Candidate(
            view=m.record.view,
            load=m.record.load,
            matched=m.matched,
            in_host=m.host_tokens,
            links=m.record.link_rates,
            absence=m.absence,
        )
        for m in fleet
    ]
    found = options(candidates, DEMAND, Random(seed))
    option = cheapest(found, Random(seed))
    if not expected:
        assert option is None
        return
    assert option is not None
    prefill = None if option.prefill is None else option.prefill.view.incarnation
    choice = (prefill, option.decode.view.incarnation)
    assert choice in expected, f"{choice} is not allowed"
    assert expected[choice] <= min(expected.values()) + 3 * TIE_S
    assert option.cost == pytest.approx(expected[choice], abs=1e-9)
    priced = priced_options(found, option)
    check_explained(priced, choice, expected, explained=True)
    check_tiers(priced, fleet)
