from collections import Counter
from random import Random

import pytest

from tandem_engine.config import Role
from tandem_services.router.cost import Demand
from tandem_services.router.local_choices import FewWorkers, LocalRouting, OwnLoad, claims_of
from tandem_services.router.membership import Membership
from tandem_services.router.views.fleet_reader import FleetSnapshot
from tandem_testing.router_builders import MODEL, make_load, make_record
from tandem_testing.service_clock import ServiceClock

DEMAND = Demand(prompt_tokens=1000, output_tokens=10, local_prefill_tokens=16)
PAIRS = [make_record(f"p{n}", Role.PREFILL) for n in range(3)] + [make_record(f"d{n}", Role.DECODE) for n in range(3)]
RATES = {record.view.incarnation: 1000.0 for record in PAIRS}


@pytest.fixture
def clock():
    return ServiceClock()


@pytest.fixture
def routing(clock):
    return LocalRouting(own=OwnLoad(clock=clock), random=Random(1))


def few_of(own: OwnLoad, records) -> FewWorkers:
    members = Membership(clock=own.clock)
    members.update(FleetSnapshot(epoch="e", workers=tuple(records), malformed=0))
    return FewWorkers(membership=members, own=own, random=Random(1))


def found_in(own: OwnLoad, records, first_block: bytes | None = None, **query):
    few = few_of(own, records)
    return few.find(MODEL, prompt_tokens=DEMAND.prompt_tokens, first_block=first_block, **query)


def send(routing: LocalRouting, first_block: bytes | None, records=PAIRS):
    option = routing.choose(found_in(routing.own, records, first_block), DEMAND)
    assert option is not None
    routing.own.add(claims_of(option, DEMAND), RATES)
    return option


def test_equal_prompts_go_to_same_idle_workers(routing, clock):
    seen = set()
    for _ in range(5):
        option = send(routing, b"block")
        seen.add((option.prefill.view.worker_id, option.decode.view.worker_id))
        routing.own.remove(claims_of(option, DEMAND))
        clock.advance(10)
    assert len(seen) == 1


def test_hot_prompt_spreads_if_queueing_costs_more_than_prefill(routing):
    chosen = Counter(send(routing, b"hot").prefill.view.worker_id for _ in range(12))
    assert len(chosen) == 3


def test_different_prompts_have_different_homes(routing, clock):
    homes = set()
    for number in range(30):
        option = send(routing, bytes([number]) * 16)
        homes.add(option.prefill.view.worker_id)
        routing.own.remove(claims_of(option, DEMAND))
        clock.advance(10)
    assert homes == {"p0", "p1", "p2"}


def test_worker_that_leaves_moves_only_its_own_prompts(routing, clock):
    def homes(records):
        found = {}
        for number in range(40):
            option = send(routing, bytes([number]) * 16, records)
            found[number] = option.prefill.view.worker_id
            routing.own.remove(claims_of(option, DEMAND))
            clock.advance(10)
        return found

    before = homes(PAIRS)
    after = homes([record for record in PAIRS if record.view.worker_id != "p1"])
    assert all(after[n] == home for n, home in before.items() if home != "p1")


def test_prefix_is_fetched_from_busy_worker_that_has_it(routing):
    chosen = [send(routing, b"hot").computing for _ in range(6)]
    home = chosen[0].view
    assert chosen[0].fetch is None
    others = [each.fetch for each in chosen if each.view != home]
    assert any(fetch is not None and fetch.source.role is Role.DECODE for fetch in others)


def test_prompts_without_a_whole_block_spread_by_load(routing):
    chosen = Counter(send(routing, None).prefill.view.worker_id for _ in range(9))
    assert max(chosen.values()) == 3


def test_guess_never_makes_a_decode_worker_compute_a_long_prompt(routing):
    assert all(send(routing, bytes([n]) * 16).prefill is not None for n in range(20))


def test_work_given_to_a_worker_is_done_after_its_predicted_time(clock):
    own = OwnLoad(clock=clock)
    record = make_record("a", load=make_load())
    option = LocalRouting(own=own, random=Random(1)).choose(found_in(own, [record]), DEMAND)
    own.add(claims_of(option, DEMAND), {"a@1": 1000.0})
    own.add(claims_of(option, DEMAND), {"a@1": 1000.0})
    assert own.wait_s("a@1") == pytest.approx(2.0)
    assert own.sequences("a@1") == 2
    clock.advance(1.5)
    assert own.wait_s("a@1") == pytest.approx(0.5)
    own.remove(claims_of(option, DEMAND))
    assert own.sequences("a@1") == 1


def test_notes_about_removed_workers_are_dropped(clock):
    own = OwnLoad(clock=clock)
    option = LocalRouting(own=own, random=Random(1)).choose(found_in(own, [make_record("a")]), DEMAND)
    own.add(claims_of(option, DEMAND), {"a@1": 1000.0})
    own.forget_all_but(set())
    assert (own.wait_s("a@1"), own.sequences("a@1")) == (0.0, 0)


def test_local_routing_without_candidates_returns_none():
    own = OwnLoad(clock=ServiceClock())
    assert LocalRouting(own=own, random=Random(1)).choose(found_in(own, []), DEMAND) is None
