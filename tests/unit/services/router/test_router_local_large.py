"""Decisions without Redis in a large fleet: they look at few workers, and find the right ones."""

from collections import Counter
from random import Random

import pytest

from tandem_engine.config import Role
from tandem_services.router.cost import Demand
from tandem_services.router.decision import Absence
from tandem_services.router.local_choices import MET, FewWorkers, LocalRouting, OwnLoad, _some, claims_of
from tandem_services.router.membership import Membership
from tandem_services.router.registry import WorkerState
from tandem_services.router.views.fleet_reader import FleetSnapshot
from tandem_testing.router_builders import MODEL, make_record
from tandem_testing.service_clock import ServiceClock

DEMAND = Demand(prompt_tokens=1000, output_tokens=10, local_prefill_tokens=16)
BLOCKS = [bytes([number]) * 16 for number in range(60)]


class Fleet:
    """Half of it prefill workers, half decode workers."""

    def __init__(self, size: int, **changes) -> None:
        self.clock = ServiceClock()
        self.own = OwnLoad(clock=self.clock)
        self.members = Membership(clock=self.clock)
        self.few = FewWorkers(membership=self.members, own=self.own, random=Random(1))
        self.routing = LocalRouting(own=self.own, random=Random(1))
        self.records = [make_record(f"w{n}", Role.PREFILL if n % 2 else Role.DECODE, **changes) for n in range(size)]
        self.show(self.records)

    def show(self, records) -> None:
        self.members.update(FleetSnapshot(epoch="e", workers=tuple(records), malformed=0))

    def find(self, first_block: bytes | None = None, **query):
        return self.few.find(MODEL, prompt_tokens=DEMAND.prompt_tokens, first_block=first_block, **query)

    def send(self, first_block: bytes | None = None):
        option = self.routing.choose(self.find(first_block), DEMAND)
        assert option is not None
        self.own.add(claims_of(option, DEMAND), {record.view.incarnation: 1000.0 for record in self.records})
        return option

    def homes(self) -> dict[bytes, str]:
        """The prefill worker of each block in an idle fleet."""
        found = {}
        for block in BLOCKS:
            option = self.send(block)
            found[block] = option.prefill.view.incarnation
            self.own.remove(claims_of(option, DEMAND))
            self.clock.advance(10)
        return found


@pytest.fixture(scope="module")
def fleet():
    return Fleet(512)


def test_prompts_of_one_prefix_go_to_the_same_workers(fleet):
    assert fleet.homes() == fleet.homes()
    assert len(set(fleet.homes().values())) > 40


def test_gateways_agree_on_the_workers_of_a_prefix(fleet):
    other = Fleet(512)
    other.show(reversed(other.records))
    assert other.homes() == fleet.homes()


def test_worker_that_leaves_moves_only_its_own_prompts():
    fleet = Fleet(200)
    before = fleet.homes()
    gone = next(iter(before.values()))
    fleet.show(record for record in fleet.records if record.view.incarnation != gone)
    after = fleet.homes()
    assert {block for block in BLOCKS if before[block] != after[block]} == {b for b in BLOCKS if before[b] == gone}


def test_decision_looks_at_as_many_workers_in_any_fleet(monkeypatch):
    looked = Counter[int]()

    def counted(size: int, fleet: Fleet) -> None:
        candidate = fleet.members.candidate

        def note(*args, **kwargs):
            looked[size] += 1
            return candidate(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(Membership, "candidate", lambda _, *args, **kwargs: note(*args, **kwargs))
            patched.setattr(Membership, "candidates", lambda *_, **__: pytest.fail("it looks at all workers"))
            for block in BLOCKS:
                assert len(fleet.find(block).records) <= 24

    for size in (64, 2048):
        counted(size, Fleet(size))
    assert looked[2048] <= 1.1 * looked[64]


def test_random_workers_are_different_and_any_of_the_fleet(fleet):
    met, random = Counter[str](), Random(1)
    names = [record.view.incarnation for record in fleet.records]
    for _ in range(400):
        some = [*_some(names, random)]
        assert len(set(some)) == len(some) == MET
        met.update(some)
    assert met.keys() == {*names}
    assert max(met.values()) <= 3 * 400 * MET / len(names)
    assert len({*_some(names[: MET - 1], random)}) == MET - 1


def test_hot_prompt_spreads_over_a_large_fleet(fleet):
    chosen = Counter(fleet.send(b"hot").prefill.view.incarnation for _ in range(60))
    assert max(chosen.values()) <= 6


def test_prompts_without_a_whole_block_spread_by_load():
    fleet = Fleet(64)
    chosen = Counter(fleet.send().prefill.view.incarnation for _ in range(64))
    assert max(chosen.values()) <= 4


def test_workers_with_prefix_in_flight_are_candidates(fleet):
    found = fleet.find(b"block", coming={"w7@1": 16, "w400@1": 32})
    assert {"w7@1", "w400@1"} <= {record.view.incarnation for record in found.records}


def test_workers_with_the_adapter_are_candidates(fleet):
    have = {"w6@1", "w7@1"}
    names = {record.view.incarnation for record in fleet.records}
    found = fleet.find(b"block", absences=dict.fromkeys(names - have, Absence(1.0, 0.0)))
    assert have <= {record.view.incarnation for record in found.records}


def test_last_worker_that_is_not_excluded_is_found(fleet):
    others = frozenset(record.view.incarnation for record in fleet.records) - {"w6@1"}
    assert [record.view.incarnation for record in fleet.find(b"block", exclude=others).records] == ["w6@1"]


def test_workers_that_drain_are_no_candidates():
    fleet = Fleet(64)
    draining = [make_record(f"w{n}", Role.DECODE, state=WorkerState.DRAINING) for n in range(0, 64, 2)]
    fleet.show([*draining[1:], *fleet.records[1::2], fleet.records[0]])
    decodes = {r.view.incarnation for r in fleet.find(b"block").records if r.view.role is Role.DECODE}
    assert decodes == {"w0@1"}


def test_last_prefill_worker_that_does_not_drain_is_found():
    fleet = Fleet(512)
    draining = [make_record(f"w{n}", Role.PREFILL, state=WorkerState.DRAINING) for n in range(3, 512, 2)]
    fleet.show([*fleet.records[::2], *draining, fleet.records[1]])
    assert fleet.send(b"block").prefill.view.incarnation == "w1@1"


def test_few_compatible_workers_are_found_in_a_large_fleet():
    fleet = Fleet(512)
    rare = [make_record(f"r{n}", role, compat_hash="rare") for n, role in enumerate((Role.PREFILL, Role.DECODE))]
    fleet.show([*fleet.records, *rare])
    others = fleet.members.groups.others("rare")
    assert len(others) == 512
    found = fleet.find(b"block", exclude=others, compat_hash="rare").records
    assert {record.view.incarnation for record in found} == {"r0@1", "r1@1"}


def test_role_without_workers_costs_decisions_nothing(monkeypatch):
    """As when a model continues with workers of both roles."""
    fleet = Fleet(64)
    fleet.show([make_record(f"w{n}", Role.DECODE) for n in range(64)])
    monkeypatch.setattr(Membership, "candidates", lambda *_, **__: pytest.fail("it looks at all workers"))
    assert {record.view.role for record in fleet.find(b"block").records} == {Role.DECODE}


def test_worker_that_changes_its_role_changes_its_group():
    fleet = Fleet(64)
    fleet.show([make_record("w0", Role.PREFILL), *fleet.records[1:]])
    groups = fleet.members.groups.groups(MODEL)
    assert "w0@1" in groups[Role.PREFILL, "same"]
    assert "w0@1" not in groups[Role.DECODE, "same"]
    assert fleet.members.groups.size(MODEL) == 64


def test_query_for_two_workers_looks_at_no_others(fleet, monkeypatch):
    looked, candidate = [], Membership.candidate

    def counted(members, name, *args, **fields):
        looked.append(name)
        return candidate(members, name, *args, **fields)

    monkeypatch.setattr(Membership, "candidate", counted)
    two = frozenset({"w0@1", "w1@1"})
    found = fleet.find(BLOCKS[0], only=two)
    assert {record.view.incarnation for record in found.records} == two
    assert set(looked) == two
