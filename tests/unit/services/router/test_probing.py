"""A worker that reports to be far slower than others of its kind gets a small share of the requests."""

from random import Random

import pytest

from tandem_engine.config import Role
from tandem_services.router.decision import ScoreTerm
from tandem_services.router.membership import Membership
from tandem_services.router.probing import LOOK_S, MAX_TOKENS, SHARE, UNUSED_S, Probing
from tandem_services.router.scoring import DECODE_ROOM, PREFILL_QUEUE
from tandem_services.router.views.fleet_reader import FleetSnapshot
from tandem_testing.router_builders import make_choice, make_load, make_query, make_record
from tandem_testing.service_clock import ServiceClock

SLOW = make_load(prefill_rate=100.0)
OTHERS = [make_record(f"w{number}", load=make_load(prefill_rate=1000.0)) for number in range(4)]


@pytest.fixture
def clock():
    return ServiceClock()


def probing_of(clock, *records) -> Probing:
    members = Membership(clock=clock)
    members.update(FleetSnapshot(epoch="e", workers=records, malformed=0))
    probing = Probing(clock=clock, membership=members, random=Random(1))
    probing.look()
    return probing


def probed(probing, queries: int, **fields) -> list[frozenset[str]]:
    asked = make_query(**{"token_ids": tuple(range(64)), **fields})
    found = (probing.probe(asked) for _ in range(queries))
    return [query.only for query in found if query is not None]


def test_slow_worker_gets_its_share_of_requests(clock):
    probing = probing_of(clock, *OTHERS, make_record("slow", load=SLOW))
    found = probed(probing, 10_000)
    assert set(found) == {frozenset({"slow@1"})}
    assert len(found) == pytest.approx(10_000 * SHARE, rel=0.3)


def test_fleet_of_equal_workers_gets_no_probes(clock):
    assert probed(probing_of(clock, *OTHERS), 1000) == []


def test_worker_of_a_slower_kind_is_no_suspect(clock):
    other = make_record("other", compat_hash="another", load=SLOW)
    assert probed(probing_of(clock, *OTHERS, other), 1000) == []


def test_worker_that_had_a_request_is_not_probed_for_a_while(clock):
    slow = make_record("slow", load=SLOW)
    probing = probing_of(clock, *OTHERS, slow)
    probing.note(make_choice("r", slow.view))
    assert probed(probing, 1000) == []
    clock.advance(UNUSED_S)
    assert probed(probing, 1000)


def test_worker_that_has_measured_itself_is_no_longer_probed(clock):
    probing = probing_of(clock, *OTHERS, make_record("slow", load=SLOW))
    fast = make_record("slow", load=make_load(prefill_rate=500.0))
    probing.membership.update(FleetSnapshot(epoch="e", workers=(*OTHERS, fast), malformed=0))
    clock.advance(LOOK_S)
    probing.look()
    assert probed(probing, 1000) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": tuple(range(MAX_TOKENS + 1))},
        {"exclude": frozenset({"w1@1"})},
        {"only": frozenset({"w1@1"})},
        {"compat_hash": "same"},
        {"adapter": b"a" * 16},
        {"may_probe": False},
    ],
    ids=["long", "retried", "beside", "resumed", "adapter", "excluded"],
)
def test_request_that_needs_certain_workers_is_no_probe(clock, fields):
    assert probed(probing_of(clock, *OTHERS, make_record("slow", load=SLOW)), 1000, **fields) == []


def test_slow_prefill_worker_is_probed_with_decode_workers(clock):
    fast = make_load(prefill_rate=1000.0)
    prefills = [make_record(f"p{number}", Role.PREFILL, load=fast) for number in range(3)]
    slow, decode = make_record("slow", Role.PREFILL, load=SLOW), make_record("d", Role.DECODE, load=fast)
    found = probing_of(clock, *prefills, slow, decode)
    assert set(probed(found, 1000)) == {frozenset({"slow@1", "d@1"})}
    assert probed(probing_of(clock, *prefills, slow), 1000) == [], "nothing decodes what it computes"


@pytest.mark.parametrize("term", [PREFILL_QUEUE, DECODE_ROOM])
def test_suspect_is_measured_only_without_waiting_requests(clock, term):
    slow, other = make_record("slow", load=SLOW), OTHERS[0]
    probing = probing_of(clock, *OTHERS, slow)

    def is_measured(record, seconds: float) -> bool:
        return probing.is_measured(make_choice("r", record.view, terms=(ScoreTerm(term, seconds),)))

    assert is_measured(slow, 0.0)
    assert not is_measured(slow, 0.1)
    assert not is_measured(other, 0.0), "a decode worker computes it for want of the suspect"
