"""When a prefix is fetched, from which worker, and its timeout. Prices are held to brute force elsewhere."""

from random import Random

import pytest

from tandem_engine.config import Role
from tandem_services.router.cost import COPY_FOLLOWERS, FETCH_S, FETCH_TURNS, FOLLOWERS, TURN_TOKENS, Candidate, Demand
from tandem_services.router.local_choices import claims_of
from tandem_services.router.scoring import (
    FETCH_TIMEOUT_FACTOR,
    MIN_FETCH_TIMEOUT_S,
    Option,
    planned_fetch,
    select,
    with_fetches,
)
from tandem_testing.router_builders import make_load, make_view

PROMPT = 1000
DEMAND = Demand(prompt_tokens=PROMPT, output_tokens=100, local_prefill_tokens=0)


def candidate(
    name: str, role: Role, *, matched: int = 0, links: dict[str, float] | None = None, compat: str = "same", **load
) -> Candidate:
    """1000 prompt tokens a second, 1000 bytes a token, 1 GB/s, idle."""
    view = make_view(name, role, compat_hash=compat)
    return Candidate(view=view, load=make_load(**load), matched=matched, links=links or {})


def choose(*candidates: Candidate) -> Option:
    option = select(candidates, DEMAND, Random(0))
    assert option is not None
    return option


def fetches(*candidates: Candidate) -> dict[str, str | None]:
    found = with_fetches(candidates, DEMAND, Random(0))
    return {each.view.worker_id: each.fetch and each.fetch.source.worker_id for each in found}


def test_idle_worker_fetches_prefix_from_busy_one():
    home = candidate("home", Role.PREFILL, matched=960, queue_tokens=100_000, prefill_rate=10_000)
    option = choose(home, candidate("idle", Role.PREFILL), candidate("d", Role.DECODE))
    assert option.computing.view.worker_id == "idle"
    assert option.computing.fetch is not None
    assert option.computing.fetch.source.worker_id == "home"
    terms = {term.name: term.seconds for term in option.terms}
    assert terms["prefix_fetch"] == pytest.approx(FETCH_S + FETCH_TURNS * TURN_TOKENS / 10_000 + 960 * 1e-6)
    assert terms["prefill_compute"] == pytest.approx(0.04)
    assert terms["prefill_stall"] == pytest.approx(0.04 * FOLLOWERS + 0.96 * COPY_FOLLOWERS)


def test_second_copy_is_not_made_for_a_short_queue():
    home = candidate("home", Role.PREFILL, matched=960, queue_tokens=1000)
    rest = [candidate("idle", Role.PREFILL), candidate("d", Role.DECODE)]
    assert choose(home, *rest).computing.view.worker_id == "home"
    longer = candidate("home", Role.PREFILL, matched=960, queue_tokens=5000)
    assert choose(longer, *rest).computing.view.worker_id == "idle"


def test_prefix_of_previous_turn_is_fetched_from_decode_worker():
    option = choose(candidate("p", Role.PREFILL, matched=320), candidate("d", Role.DECODE, matched=960))
    assert option.prefill is not None
    assert option.prefill.fetch is not None
    assert (option.prefill.fetch.source.worker_id, option.prefill.fetch.tokens) == ("d", 960)


def test_reserved_tokens_are_those_left_to_compute():
    option = choose(candidate("p", Role.PREFILL), candidate("d", Role.DECODE, matched=960))
    assert [claim.queue_tokens for claim in claims_of(option, DEMAND)] == [40, 0]


@pytest.mark.parametrize(
    "source",
    [
        {"links": {"p@1": 1e3}},
        {"links": {"p@1": 0.0}},
        {"matched": 1},
        {"sequences": 1, "step_s": 1.0},
    ],
    ids=["slow link", "broken link", "a token", "slow turns"],
)
def test_fetch_without_gain_is_not_planned(source):
    have = candidate("d", Role.DECODE, **{"matched": 960, **source})
    assert fetches(candidate("p", Role.PREFILL), have)["p"] is None


def test_kv_of_another_shape_is_not_fetched():
    have = candidate("d", Role.DECODE, matched=960, compat="other")
    option = choose(candidate("p", Role.PREFILL), candidate("d2", Role.DECODE), have)
    assert option.computing.fetch is None


def test_fetch_overlaps_with_queue_time_in_cost():
    have = candidate("d", Role.DECODE, matched=960, token_bytes=1e5)
    (idle, busy, _) = with_fetches(
        [candidate("idle", Role.PREFILL), candidate("busy", Role.PREFILL, queue_tokens=500), have], DEMAND, Random(0)
    )
    assert idle.fetch == busy.fetch is not None
    terms = {term.name: term.seconds for term in choose(busy, have).terms}
    assert terms["prefix_fetch"] == 0.0


def test_nearer_of_two_fetch_sources_is_chosen():
    near = candidate("near", Role.DECODE, matched=928)
    far = candidate("far", Role.DECODE, matched=960, links={"p@1": 1e6})
    assert fetches(candidate("p", Role.PREFILL), near, far)["p"] == "near"


def test_worker_with_longest_prefix_fetches_nothing():
    assert fetches(candidate("p", Role.PREFILL, matched=960), candidate("d", Role.DECODE, matched=320)) == {
        "p": None,
        "d": "p",
    }


def test_fetch_timeout_is_compute_time_with_a_minimum():
    def within(requester: Candidate | None = None, **have) -> float:
        source = candidate("d", Role.DECODE, **have)
        fetched = with_fetches([requester or candidate("p", Role.PREFILL), source], DEMAND, Random(0))[0]
        planned = planned_fetch(fetched, DEMAND)
        assert planned is not None
        return planned.within_s

    assert within(matched=960) == pytest.approx(0.96)
    assert within(candidate("b", Role.BOTH, sequences=9), matched=960) == pytest.approx(0.96)
    assert within(matched=48) == MIN_FETCH_TIMEOUT_S
    slow = FETCH_S + 960 * 1e5 / 1e9 * 5
    assert within(matched=960, links={"p@1": 2e8}, token_bytes=1e5) == pytest.approx(FETCH_TIMEOUT_FACTOR * slow)


def test_no_fetch_is_planned_without_a_cached_prefix():
    assert planned_fetch(candidate("p", Role.PREFILL), DEMAND) is None
