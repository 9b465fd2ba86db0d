"""What the absence of an adapter costs, and which worker may have to load it."""

from dataclasses import replace
from random import Random

import pytest

from tandem_engine.messages.control import AdapterMemory, ServedAdapter
from tandem_services.router.adapter_prices import ASSUMED_BYTE_S, ASSUMED_SIZE, COMMAND_S, REPORTED_S, AdapterPrices
from tandem_services.router.cost import Candidate, Demand
from tandem_services.router.decision import (
    Absence,
    Placement,
    Reservation,
    RouteDecision,
    RouteQuery,
    Source,
    WorkerView,
)
from tandem_services.router.scoring import options
from tandem_testing.router_builders import make_load, make_query, make_view
from tandem_testing.service_clock import ServiceClock

DIGEST, OTHER = "0a" * 16, "0b" * 16
"""In hexadecimal."""
SIZE = 1_000_000


def worker(name: str, **memory) -> WorkerView:
    return make_view(name, adapter_memory=AdapterMemory(**{"limit": 2, "loads": True, **memory}))


def query(**fields) -> RouteQuery:
    known = {"adapter": bytes.fromhex(DIGEST), "registered": True, "adapter_size": SIZE}
    return replace(make_query(token_ids=(1, 2)), **{**known, **fields})


@pytest.fixture
def clock() -> ServiceClock:
    return ServiceClock()


@pytest.fixture
def prices(clock) -> AdapterPrices:
    return AdapterPrices(clock=clock)


def test_absent_adapter_costs_measured_load_time(prices):
    workers = [worker("has", resident=(DIGEST,)), worker("fast", byte_s=1e-8), worker("new")]
    assert prices.absences(query(), workers) == {
        "fast@1": Absence(pytest.approx(COMMAND_S + SIZE * 1e-8), 0.0),
        "new@1": Absence(pytest.approx(COMMAND_S + SIZE * ASSUMED_BYTE_S), 0.0),
    }
    [unknown] = prices.absences(query(adapter_size=0), workers[2:]).values()
    assert unknown.load_s == pytest.approx(COMMAND_S + ASSUMED_SIZE * ASSUMED_BYTE_S)
    assert prices.absences(query(adapter=b""), workers) == {}


def test_full_adapter_memory_adds_eviction_cost(prices):
    full = worker("w", limit=1, resident=(OTHER,), mean_size=3 * SIZE, byte_s=1e-8)
    [absence] = prices.absences(query(), [full]).values()
    assert absence.evict_s == pytest.approx(COMMAND_S + 3 * SIZE * 1e-8)


def test_adapter_being_loaded_costs_the_remaining_time(prices, clock):
    view = worker("w", byte_s=1e-6)
    asked = replace(query(), absences=prices.absences(query(), [view]))
    prices.note(choice_of(view), asked)
    load_s = asked.absences["w@1"].load_s
    clock.advance(load_s / 4)
    prices.note(choice_of(view), replace(query(), absences=prices.absences(query(), [view])))
    assert prices.absences(query(), [view]) == {"w@1": Absence(pytest.approx(load_s * 3 / 4), 0.0)}
    clock.advance(load_s)
    assert prices.absences(query(), [view]) == {"w@1": Absence(0.0, 0.0)}
    clock.advance(load_s + REPORTED_S)  # it has not loaded it
    assert prices.absences(query(), [view]) == asked.absences


def choice_of(view: WorkerView) -> RouteDecision:
    return RouteDecision(
        request_id="r",
        decode=view,
        prefill=None,
        source=Source.LOCAL,
        placement=Placement.ALONE,
        terms=(),
        matched_tokens=0,
        reservation=Reservation(None, ()),
    )


@pytest.mark.parametrize(
    ("memory", "registered", "able"),
    [
        ({"resident": (DIGEST,), "loads": False}, False, True),
        ({}, True, True),
        ({}, False, False),
        ({"loads": False}, True, False),
        ({"refused": (DIGEST,)}, True, False),
    ],
)
def test_worker_serves_resident_or_loadable_adapters(memory, registered, able):
    assert query(registered=registered).served_by(worker("w", **memory)) is able


def test_worker_of_previous_release_serves_adapters_by_name():
    named = ServedAdapter(name="sql", digest=DIGEST, rank=1, root="sql")
    view = make_view("w", adapters={"sql": named})
    assert query().served_by(view)
    assert not query(adapter=bytes.fromhex(OTHER)).served_by(view)
    left = replace(view, adapter_memory=AdapterMemory(limit=2))  # it made way, and the worker knows the folder
    assert query(registered=False).served_by(left)


@pytest.mark.parametrize(("waiting_s", "expected"), [(0.4, "hot"), (0.6, "idle")])
def test_hot_adapter_spreads_when_its_queue_costs_more(waiting_s, expected):
    busy, free = [make_load(queue_tokens=seconds * 1000, prefill_rate=1000) for seconds in (waiting_s, 0.0)]
    hot = Candidate(view=make_view("hot"), load=busy, matched=0)
    idle = Candidate(view=make_view("idle"), load=free, matched=0, absence=Absence(0.5, 0.0))
    demand = Demand(prompt_tokens=100, output_tokens=10, local_prefill_tokens=0)
    best = min(options([hot, idle], demand, Random(1)), key=lambda option: option.cost)
    assert best.decode.view.worker_id == expected
