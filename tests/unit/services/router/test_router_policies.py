"""Each policy keeps its candidates, and roles have policies of their own."""

from collections import Counter
from random import Random

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import Role
from tandem_services.router.decision import RouteQuery, WorkerView
from tandem_services.router.policies import POLICIES, Contender, PoliciesByRole, PolicyNames, SlowStart
from tandem_testing.router_builders import MODEL, FittingList, make_view
from tandem_testing.scheduler_builders import ManualClock


def query(number: int = 0, **changes) -> RouteQuery:
    return RouteQuery(**{"request_id": f"r{number}", "model": MODEL, "token_ids": (1, 2)} | changes)


def picks(name: str, contenders, queries) -> list[str]:
    policy = POLICIES[name](Random(1))
    chosen = []
    for each in queries:
        kept = policy.narrow(contenders, each)
        assert len(kept) == 1
        chosen.append(kept[0].incarnation)
    return chosen


EVEN = [Contender(name, 0.0) for name in "abcd"]


def test_locality_policy_narrows_no_candidates():
    assert POLICIES["locality"](Random(1)).narrow(EVEN, query()) == EVEN


def test_round_robin_rotates_when_candidates_change():
    policy = POLICIES["round_robin"](Random(1))
    order = [policy.narrow(EVEN, query())[0].incarnation for _ in range(6)]
    assert order == ["a", "b", "c", "d", "a", "b"]
    assert policy.narrow(EVEN[:1], query())[0].incarnation == "a"
    assert policy.narrow([EVEN[0], EVEN[3]], query())[0].incarnation == "d"


def test_least_loaded_takes_the_least_and_shares_ties():
    uneven = [Contender("a", 2.0), Contender("b", 1.0), Contender("c", 1.0)]
    assert set(picks("least_loaded", uneven, [query()] * 40)) == {"b", "c"}


def test_power_of_two_avoids_only_the_most_loaded_worker():
    uneven = [Contender(name, float(load)) for load, name in enumerate("abcd")]
    counts = Counter(picks("power_of_two", uneven, [query()] * 400))
    assert set(counts) == {"a", "b", "c"}
    assert counts["a"] > counts["b"] > counts["c"]
    assert picks("power_of_two", EVEN[:1], [query()]) == ["a"]


def test_session_policy_remaps_only_keys_of_removed_worker():
    queries = [query(n, session_key=f"user-{n}") for n in range(200)]
    before = picks("session", EVEN, queries)
    assert before == picks("session", EVEN[::-1], queries)
    assert set(before) == set("abcd")
    after = picks("session", EVEN[:3], queries)
    assert all(new == old for new, old in zip(after, before, strict=True) if old != "d")


def test_session_without_a_key_spreads_and_tenants_differ():
    assert set(picks("session", EVEN, [query(n) for n in range(50)])) == set("abcd")
    salts = [query(session_key="same", cache_salt=f"tenant-{n}") for n in range(50)]
    assert set(picks("session", EVEN, salts)) == set("abcd")


def by_role(names: str, **outstanding: float) -> PoliciesByRole:
    def load(view: WorkerView) -> float:
        return outstanding.get(view.worker_id, 0.0)

    return PoliciesByRole(PolicyNames.parse(names), Random(1), load, slow_start=SlowStart(clock=ManualClock()))


FLEET = FittingList(
    [
        make_view("p1", Role.PREFILL),
        make_view("p2", Role.PREFILL),
        make_view("d1", Role.DECODE),
        make_view("d2", Role.DECODE),
    ]
)


def test_one_name_counts_for_both_roles():
    assert by_role("least_loaded", p1=1.0, d2=3.0).passed_over(FLEET, query()) == {"p1@1", "d2@1"}


def test_each_role_may_have_its_own():
    policies = by_role("prefill=locality,decode=least_loaded", d2=3.0)
    assert policies.passed_over(FLEET, query()) == {"d2@1"}
    assert by_role("prefill=least_loaded", p1=1.0).passed_over(FLEET, query()) == {"p1@1"}


def test_prefill_choice_is_compatible_with_decode_worker():
    fleet = FittingList(
        [
            *FLEET[:2],
            make_view("p3", Role.PREFILL, compat_hash="new"),
            make_view("d3", Role.DECODE, compat_hash="new"),
        ]
    )
    over = by_role("round_robin").passed_over(fleet, query(exclude=frozenset()))
    assert {view.incarnation for view in fleet} - over == {"p3@1", "d3@1"}


def test_locality_for_all_roles_looks_at_no_worker():
    fleet = FittingList(FLEET)
    fleet.looks = 0
    assert by_role("locality").passed_over(fleet, query()) == frozenset()
    assert fleet.looks == 0


def test_share_of_queries_goes_to_any_worker():
    names, start = PolicyNames.parse("locality"), SlowStart(clock=ManualClock())
    policies = PoliciesByRole(names, Random(1), lambda _: 0.0, slow_start=start, exploration=0.2)
    left = Counter[frozenset[str]]()
    for number in range(1000):
        over = policies.passed_over(FLEET, query(number))
        left[frozenset(view.incarnation for view in FLEET) - over] += 1
    explored = {kept: count for kept, count in left.items() if len(kept) == 2}
    assert sum(explored.values()) == pytest.approx(200, abs=40)
    assert len(explored) == 4, "any worker of each role"
    assert left[frozenset(view.incarnation for view in FLEET)] == 1000 - sum(explored.values())


@pytest.mark.parametrize(
    "text", ["", "locale", "prefill=locale", "both=locality", "prefill=locality,prefill=session", ","]
)
def test_unknown_policies_and_roles_are_refused_by_name(text):
    with pytest.raises(ConfigError, match="--router-policy"):
        PolicyNames.parse(text)
