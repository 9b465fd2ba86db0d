"""Which starts of workers new requests wait for, and for how long."""

from dataclasses import dataclass, field

import pytest

from tandem_engine.config import Role
from tandem_services.gateway.queueing.worker_starts import MAX_FOLLOWED, MIN_S, WorkerStarts
from tandem_services.router.decision import WorkerView
from tandem_services.router.starting import StartingWorker
from tandem_testing.router_builders import MODEL, make_view
from tandem_testing.service_clock import ServiceClock


@dataclass
class View:
    """What a router knows."""

    there: list[WorkerView] = field(default_factory=list)
    reports: list[StartingWorker] = field(default_factory=list)

    def workers(self) -> tuple[WorkerView, ...]:
        return tuple(self.there)

    def offered(self) -> tuple[WorkerView, ...]:
        return tuple(self.there)

    def starting(self) -> tuple[StartingWorker, ...]:
        return tuple(self.reports)


def report(name: str, role: str = "decode", *, number: int = 1, model: str = MODEL, seconds: float = 0.0):
    return StartingWorker(
        worker_id=name, incarnation=f"{name}@{number}", role=role, model=model, phase="weights", seconds=seconds
    )


def starts_of(view: View, *, limit_s: float = 100.0, needs_prefill: bool = False, replaced: bool = False):
    clock = ServiceClock()
    return WorkerStarts(
        fleet=view, clock=clock, model=MODEL, limit_s=limit_s, needs_prefill=needs_prefill, replaced=replaced
    )


@pytest.mark.parametrize(
    ("there", "needs_prefill", "reports", "expected"),
    [
        ([], False, [], False),
        ([], False, ["decode"], True),
        ([], False, ["both"], True),
        ([], False, ["prefill"], False),
        ([], False, ["a role of another release"], False),
        ([Role.PREFILL], False, ["decode"], True),
        ([Role.PREFILL], False, ["prefill"], False),
        ([Role.DECODE], False, [], True),
        ([Role.DECODE], True, [], False),
        ([Role.DECODE], True, ["prefill"], True),
        ([], True, ["decode"], False),
        ([], True, ["decode", "prefill"], True),
        ([Role.BOTH], True, [], True),
    ],
)
def test_each_lacking_role_has_to_start(there, needs_prefill, reports, expected):
    view = View([make_view(f"w{n}", role) for n, role in enumerate(there)], [report(role, role) for role in reports])
    assert starts_of(view, needs_prefill=needs_prefill).expected(within_s=1.0) is expected


def test_worker_of_another_model_is_not_waited_for():
    assert not starts_of(View(reports=[report("a", model="other")])).expected(within_s=1.0)


def test_start_counts_a_while_after_its_last_report():
    """Between the last report and the first view with the worker both are missing."""
    view = View(reports=[report("a")])
    starts = starts_of(view)
    assert starts.expected(within_s=9.0)
    view.reports = []
    starts.clock.advance(8.9)
    assert starts.expected(within_s=9.0)
    starts.clock.advance(0.2)
    assert not starts.expected(within_s=9.0)


def test_worker_that_crashes_again_and_again_is_waited_for_once():
    view = View()
    starts = starts_of(view, limit_s=100.0)
    waited = 0
    for second in range(300):
        view.reports = [report("a", number=second // 20)]
        waited += starts.expected(within_s=1.0)
        starts.clock.advance(1.0)
    assert waited == 100


def test_worker_that_has_served_is_waited_for_again():
    view = View(reports=[report("a", number=1)])
    starts = starts_of(view, limit_s=10.0)
    starts.look()
    view.there, view.reports = [make_view("a", incarnation="a@1")], []
    starts.clock.advance(9.0)
    starts.look()
    view.there, view.reports = [], [report("a", number=2)]
    starts.clock.advance(5.0)
    assert starts.expected(within_s=1.0)


def test_number_of_followed_workers_is_bounded():
    view = View()
    starts = starts_of(view)
    for batch in range(MAX_FOLLOWED // 100 + 2):
        view.reports = [report(f"w{batch}-{n}") for n in range(100)]
        starts.look()
    assert not starts.expected(within_s=0.0), "reports beyond the bound do not count"
    starts.clock.advance(200.0)
    starts.look()
    assert starts.expected(within_s=1.0), "those that report no more have made room"


def test_remaining_time_is_that_of_the_last_start():
    view = View(reports=[report("a", seconds=30.0)])
    starts = starts_of(view)
    assert starts.remaining_s() == MIN_S, "nothing is known yet"
    starts.look()
    assert starts.remaining_s() == 30.0, "as long again"
    starts.clock.advance(10.0)
    view.there, view.reports = [make_view("a", incarnation="a@1")], []
    starts.look()
    view.there, view.reports = [], [report("a", number=2, seconds=5.0)]
    starts.look()
    assert starts.remaining_s() == pytest.approx(40.0 - 5.0)
    starts.clock.advance(90.0)
    assert starts.remaining_s() == MIN_S


def test_remaining_time_is_bounded_whatever_is_reported():
    """Progress is not signed, and clients get the time."""
    starts = starts_of(View(reports=[report("a", seconds=9e8)]))
    starts.look()
    assert starts.remaining_s() == starts.limit_s


def test_start_that_was_not_watched_to_its_end_teaches_no_time():
    view = View(reports=[report("a", seconds=5.0)])
    starts = starts_of(view)
    starts.look()
    starts.clock.advance(90.0)
    view.there, view.reports = [make_view("a", incarnation="a@1")], []
    starts.look()
    view.there, view.reports = [], [report("a", number=2, seconds=5.0)]
    starts.look()
    assert starts.remaining_s() == 5.0, "as long again"


def test_hanging_worker_is_not_waited_for_again_after_a_quiet_time():
    view = View(reports=[report("a")])
    starts = starts_of(view, limit_s=100.0)
    starts.look()
    for _ in range(5):
        starts.clock.advance(150.0)
        waited = starts.expected(within_s=1.0)
    assert not waited


def test_lost_worker_that_is_replaced_is_expected_without_report():
    """Its pod pulls an image."""
    starts = starts_of(View(), limit_s=60.0, replaced=True)
    assert starts.expected(within_s=9.0)
    starts.clock.advance(59.0)
    assert starts.expected(within_s=9.0)
    starts.clock.advance(10.5)
    assert not starts.expected(within_s=9.0)
    assert not starts_of(View()).expected(within_s=9.0)


def test_next_loss_of_a_replaced_worker_counts_afresh():
    view = View()
    starts = starts_of(view, limit_s=60.0, replaced=True)
    assert starts.expected(within_s=9.0)
    starts.clock.advance(100.0)
    assert not starts.expected(within_s=9.0)
    view.there = [make_view("w", Role.DECODE)]
    starts.note_lack()
    view.there = []
    assert starts.expected(within_s=9.0)
    starts.clock.advance(100.0)
    # A prefill worker alone ends no lack of decode workers.
    view.there = [make_view("p", Role.PREFILL)]
    starts.note_lack()
    assert not starts.expected(within_s=9.0)


def test_replacement_is_expected_from_the_loss_not_from_a_request():
    """Of a service whose workers were removed on purpose, the first request of the day is refused as soon as any."""
    view = View([make_view("w", Role.DECODE)])
    starts = starts_of(view, limit_s=60.0, replaced=True)
    starts.note_lack()
    view.there = []
    starts.note_lack()
    starts.clock.advance(3600.0)
    assert not starts.expected(within_s=9.0)
