"""The cost model by itself, and the decisions that follow from it."""

from random import Random

import pytest

from tandem_engine.config import Role
from tandem_services.router import cost
from tandem_services.router.cost import (
    BROKEN_TOKEN_S,
    COPY_FOLLOWERS,
    FOLLOWERS,
    HANDOFF_S,
    NO_ROOM_S,
    PAIR_ENDS,
    Candidate,
    Demand,
    Load,
)
from tandem_services.router.decision import Placement
from tandem_services.router.scoring import Option, select
from tandem_testing.router_builders import make_load, make_view

PROMPT = 1000
DEMAND = Demand(prompt_tokens=PROMPT, output_tokens=100, local_prefill_tokens=10_000)
SLOW, FAST = 1e6, 1e10


def candidate(
    name: str, role: Role, *, matched: int = 0, links: dict[str, float] | None = None, **load: float
) -> Candidate:
    """1000 prompt tokens a second, 1000 bytes a token, idle."""
    return Candidate(view=make_view(name, role), load=make_load(**load), matched=matched, links=links or {})


def choose(*candidates: Candidate, demand: Demand = DEMAND) -> Option:
    option = select(candidates, demand, Random(0))
    assert option is not None
    return option


def term(option: Option, name: str) -> float:
    return next(term.seconds for term in option.terms if term.name == name)


def test_each_term_by_hand():
    load = Load(
        queue_tokens=500,
        prefill_rate=1000,
        sequences=4,
        step_s=0.01,
        room_tokens=1099,
        max_sequences=8,
        token_bytes=1e3,
    )
    assert cost.prefill_queue_s(load) == 0.5
    assert cost.prefill_compute_s(load, 600, DEMAND) == 0.4
    assert cost.waiting_sequences(load, Role.BOTH) == 4 + FOLLOWERS
    assert cost.waiting_sequences(load, Role.DECODE) == 5 + FOLLOWERS
    assert cost.waiting_sequences(load, Role.PREFILL) == FOLLOWERS
    assert cost.copy_s(load, 600) == pytest.approx(0.6 * COPY_FOLLOWERS)
    assert cost.transfer_s(cost.token_s(load, 1e6), 600, DEMAND) == pytest.approx(HANDOFF_S + 0.4)
    assert cost.decode_load_s(load) == 0.04
    assert cost.decode_room_s(load, DEMAND) == NO_ROOM_S


def test_cached_prompt_still_costs_one_token():
    assert cost.prefill_compute_s(make_load(), PROMPT, DEMAND) == 0.001
    assert cost.transfer_s(0.5, PROMPT, DEMAND) == HANDOFF_S + 0.5


@pytest.mark.parametrize(
    ("rate", "seconds"),
    [(None, 1e-6), (1e6, 1e-3), (0.0, BROKEN_TOKEN_S), (1.0, BROKEN_TOKEN_S)],
    ids=["no figure", "measured", "broken", "absurdly slow"],
)
def test_link_cost_is_measured_rate_or_typical_of_worker(rate, seconds):
    assert cost.token_s(make_load(), rate) == seconds


def test_long_prompt_is_disaggregated_despite_idle_decode_worker():
    option = choose(candidate("p", Role.PREFILL), candidate("d", Role.DECODE))
    assert option.placement is Placement.PAIR


def test_cached_prefix_is_worth_a_queue_but_not_any_queue():
    has_it = {"matched": PROMPT - 100}
    busy = candidate("has", Role.BOTH, queue_tokens=2000, **has_it)
    assert choose(busy, candidate("idle", Role.BOTH)).decode.view.worker_id == "has"
    full = candidate("has", Role.BOTH, queue_tokens=6000, **has_it)
    assert choose(full, candidate("idle", Role.BOTH)).decode.view.worker_id == "idle"


def test_short_rest_is_computed_by_decode_worker():
    option = choose(candidate("p", Role.PREFILL, matched=999), candidate("d", Role.DECODE, matched=999))
    assert option.placement is Placement.LOCAL


def test_busy_decode_worker_gets_no_local_prefill():
    option = choose(candidate("p", Role.PREFILL, matched=990), candidate("d", Role.DECODE, matched=990, sequences=20))
    assert option.placement is Placement.PAIR


def test_long_prefill_queue_makes_prompt_local():
    assert choose(candidate("p", Role.PREFILL, queue_tokens=500), candidate("d", Role.DECODE)).prefill is not None
    assert choose(candidate("p", Role.PREFILL, queue_tokens=5000), candidate("d", Role.DECODE)).prefill is None


def test_prefix_is_recomputed_if_transfer_takes_longer():
    decode = candidate("d", Role.DECODE)
    has_it = {"matched": PROMPT - 1}
    assert choose(candidate("p", Role.PREFILL, links={"d@1": FAST}, **has_it), decode).placement is Placement.PAIR
    slow = candidate("p", Role.PREFILL, links={"d@1": 1e5}, **has_it)
    assert choose(slow, decode).placement is Placement.LOCAL


def test_slow_link_is_avoided_and_so_is_a_broken_one():
    decode = candidate("d", Role.DECODE)
    for rate in (SLOW, 0.0):
        option = choose(
            candidate("near", Role.PREFILL, links={"d@1": FAST}, queue_tokens=100),
            candidate("far", Role.PREFILL, links={"d@1": rate}),
            decode,
        )
        assert option.prefill is not None
        assert option.prefill.view.worker_id == "near"


def test_decode_end_is_chosen_with_the_link_too():
    prefill = candidate("p", Role.PREFILL, links={"near@1": FAST, "far@1": SLOW})
    option = choose(prefill, candidate("near", Role.DECODE, sequences=5), candidate("far", Role.DECODE))
    assert option.decode.view.worker_id == "near"
    assert term(option, "transfer") == pytest.approx(HANDOFF_S + PROMPT * 1000 / FAST)


def test_local_prefill_limit_0_allows_only_prefill_fallback():
    never = Demand(prompt_tokens=PROMPT, output_tokens=1, local_prefill_tokens=0)
    decode = candidate("d", Role.DECODE, matched=PROMPT)
    assert choose(candidate("p", Role.PREFILL, queue_tokens=1e6), decode, demand=never).placement is Placement.PAIR
    assert choose(decode, demand=never).placement is Placement.DEGRADED


def test_single_worker_for_both_is_not_local_or_degraded():
    assert choose(candidate("b", Role.BOTH)).placement is Placement.ALONE


def test_slow_link_of_cheapest_prefill_is_avoided_in_large_fleet():
    decodes = [candidate(f"d{n}", Role.DECODE) for n in range(20)]
    good = {f"d{n}@1": FAST for n in range(20)}
    prefills = [candidate(f"p{n}", Role.PREFILL, links=good, queue_tokens=10) for n in range(20)]
    far = candidate("far", Role.PREFILL, links=dict.fromkeys(good, SLOW), transfer_rate=SLOW)
    assert len(prefills) > PAIR_ENDS
    option = choose(far, *prefills, *decodes)
    assert option.prefill is not None
    assert option.prefill.view.worker_id != "far"


def test_equal_ends_of_a_large_fleet_share_the_work():
    prefills = [candidate(f"p{n}", Role.PREFILL) for n in range(3 * PAIR_ENDS)]
    decodes = [candidate(f"d{n}", Role.DECODE) for n in range(3 * PAIR_ENDS)]
    random = Random(1)
    chosen = [select([*prefills, *decodes], DEMAND, random) for _ in range(300)]
    assert {option.prefill.view.worker_id for option in chosen} == {each.view.worker_id for each in prefills}
    assert {option.decode.view.worker_id for option in chosen} == {each.view.worker_id for each in decodes}
