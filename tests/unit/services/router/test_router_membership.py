import pytest

from tandem_engine.base.release import RELEASE, WINDOW
from tandem_services.router.membership import RETRY_LOST_AFTER_S, RETRY_REJECTED_AFTER_S, VIEW_DELAY_S, Membership
from tandem_services.router.registry import WorkerState
from tandem_services.router.views.fleet_reader import FleetSnapshot
from tandem_testing.router_builders import MODEL, make_record
from tandem_testing.service_clock import ServiceClock


@pytest.fixture
def clock():
    return ServiceClock()


@pytest.fixture
def members(clock):
    return Membership(clock=clock)


def snapshot(*records, epoch: str = "first", malformed: int = 0) -> FleetSnapshot:
    return FleetSnapshot(epoch=epoch, workers=records, malformed=malformed)


def names(members: Membership) -> set[str]:
    return {worker.incarnation for worker in members.workers()}


def test_snapshot_replaces_the_view(members):
    members.update(snapshot(make_record("a"), make_record("b")))
    members.update(snapshot(make_record("b")))
    assert names(members) == {"b@1"}


def test_workers_that_take_no_new_requests_are_not_offered(members):
    states = {str(state): make_record(str(state), state=state) for state in WorkerState}
    members.update(snapshot(*states.values(), make_record("refused")))
    members.note_refusal("refused@1", WorkerState.DRAINING)
    assert len(names(members)) == len(states) + 1
    assert [worker.worker_id for worker in members.offered()] == ["ready"]


def test_after_a_wipe_the_old_view_stays_for_one_lease(members, clock):  # [redis-is-optional]
    members.update(snapshot(make_record("a"), make_record("b")))
    members.update(snapshot(make_record("b"), epoch="second"))
    assert names(members) == {"a@1", "b@1"}
    clock.advance(3.1)
    members.update(snapshot(make_record("b"), epoch="second"))
    assert names(members) == {"b@1"}


def test_malformed_rows_are_handled_like_a_wipe(members):
    members.update(snapshot(make_record("a")))
    members.update(snapshot(malformed=1))
    assert names(members) == {"a@1"}


def test_lasting_malformed_rows_do_not_keep_dead_workers(members, clock):  # [redis-values-untrusted]
    members.update(snapshot(make_record("a"), make_record("b")))
    for _ in range(5):
        members.update(snapshot(make_record("b"), malformed=1))
        clock.advance(1.0)
    assert names(members) == {"b@1"}


def test_new_incarnation_replaces_old_one_after_redis_wipe(members):
    members.update(snapshot(make_record("a", number=1)))
    members.update(snapshot(make_record("a", number=2), epoch="second"))
    assert names(members) == {"a@2"}


def test_dead_worker_is_excluded_until_heartbeats_persist(members, clock):
    members.update(snapshot(make_record("a"), make_record("b")))
    members.mark_dead("a@1")
    assert names(members) == {"b@1"}
    assert [r.view.worker_id for r in members.candidates(MODEL, prompt_tokens=1, exclude=frozenset())] == ["b"]
    clock.advance(RETRY_LOST_AFTER_S - 1)
    members.update(snapshot(make_record("a"), make_record("b")))
    assert names(members) == {"b@1"}
    clock.advance(2)
    members.update(snapshot(make_record("a"), make_record("b")))
    assert names(members) == {"a@1", "b@1"}


def test_dead_worker_that_has_answered_since_is_used_again(members):  # [cut-is-not-death]
    members.update(snapshot(make_record("a"), make_record("b")))
    members.mark_dead("a@1")
    members.mark_alive("a@1")
    assert names(members) == {"a@1", "b@1"}
    assert len(members.candidates(MODEL, prompt_tokens=1, exclude=frozenset())) == 2


def test_mark_alive_does_not_restore_unregistered_worker(members):
    members.update(snapshot(make_record("a")))
    members.mark_dead("a@1")
    members.update(snapshot())
    members.mark_alive("a@1")
    assert names(members) == set()


def test_dead_worker_that_left_the_registry_is_forgotten(members):
    members.update(snapshot(make_record("a")))
    members.mark_dead("a@1")
    members.update(snapshot())
    assert members.dead == frozenset()


def test_while_redis_is_away_a_dead_worker_stays_dead(members, clock):
    members.update(snapshot(make_record("a")))
    members.mark_dead("a@1")
    clock.advance(3600)
    assert names(members) == set()


def test_unfit_workers_are_no_candidates(members):
    members.update(
        snapshot(
            make_record("draining", state=WorkerState.DRAINING),
            make_record("stalled", state=WorkerState.STALLED),
            make_record("short", context_length=10),
            make_record("foreign", model="other"),
            make_record("good"),
        )
    )
    found = members.candidates(MODEL, prompt_tokens=10, exclude=frozenset())
    assert [record.view.worker_id for record in found] == ["good"]


def test_page_size_of_the_majority_counts(members):
    assert members.page_size(MODEL) is None
    members.update(
        snapshot(make_record("a", page_size=32), make_record("b", page_size=16), make_record("c", page_size=16))
    )
    assert members.page_size(MODEL) == 16


def test_member_list_for_people_includes_suspected_workers(members):
    members.update(snapshot(make_record("w1"), make_record("w2")))
    members.mark_dead("w2@1")
    seen = {each.record.view.worker_id: each.suspect for each in members.members()}
    assert seen == {"w1": False, "w2": True}


def offered(members: Membership) -> set[str]:
    return {each.view.worker_id for each in members.candidates(MODEL, prompt_tokens=1, exclude=frozenset())}


@pytest.mark.parametrize("state", [WorkerState.DRAINING, WorkerState.PAUSED])
def test_rejecting_worker_is_excluded_until_later_ready_view(members, clock, state):
    both = snapshot(make_record("a"), make_record("b"))
    members.update(both)
    members.note_refusal("a@1", state)
    assert offered(members) == {"b"}
    assert {each.record.view.worker_id: each.record.state for each in members.members()} == {
        "a": state,
        "b": WorkerState.READY,
    }
    assert names(members) == {"a@1", "b@1"}, "it answers: what it runs goes on"
    clock.advance(1.0)
    members.update(both)
    assert offered(members) == {"a", "b"}


def test_view_requested_before_rejection_keeps_worker_excluded(members, clock):
    both = snapshot(make_record("a"), make_record("b"))
    members.update(both)
    requested_at = clock.now()
    clock.advance(0.01)
    members.note_refusal("a@1", WorkerState.PAUSED)
    members.update(both, requested_at=requested_at)
    assert offered(members) == {"b"}
    clock.advance(VIEW_DELAY_S / 2)
    members.update(both)
    assert offered(members) == {"b"}
    clock.advance(VIEW_DELAY_S)
    members.update(both)
    assert offered(members) == {"a", "b"}


def test_worker_that_refuses_repeatedly_is_excluded_each_time(members, clock):
    both = snapshot(make_record("a"), make_record("b"))
    for _ in range(3):
        clock.advance(1.0)
        members.update(both)
        assert offered(members) == {"a", "b"}
        members.note_refusal("a@1", WorkerState.PAUSED)
        assert offered(members) == {"b"}


def test_rejecting_worker_is_retried_after_delay_without_redis(members, clock):
    members.update(snapshot(make_record("a"), make_record("b")))
    members.note_refusal("a@1", WorkerState.PAUSED)
    clock.advance(RETRY_REJECTED_AFTER_S)
    assert offered(members) == {"b"}
    clock.advance(0.1)
    assert offered(members) == {"a", "b"}


def test_new_incarnation_of_rejecting_worker_is_offered(members):
    members.update(snapshot(make_record("a", number=1)))
    members.note_refusal("a@1", WorkerState.DRAINING)
    members.update(snapshot(make_record("a", number=2)))
    assert offered(members) == {"a"}


class Watched:
    """Proofs of a gateway: workers in `answering` have answered it, those in `silent` were asked and have not."""

    def __init__(self) -> None:
        self.workers: set[str] = set()
        self.unlisted: frozenset[str] = frozenset()
        self.silent: frozenset[str] = frozenset()
        self.answering: set[str] = set()
        self.again: list[tuple[str, bool]] = []
        """Workers that are watched again, and whether Redis does not name them."""

    def watch(self, workers, *, unlisted) -> None:
        self.workers = {worker.incarnation for worker in workers}
        self.unlisted = unlisted

    def watch_again(self, worker, *, unlisted) -> None:
        self.workers.add(worker.incarnation)
        self.again.append((worker.incarnation, unlisted))

    def proven(self, incarnation: str) -> bool:
        return incarnation in self.answering

    def proven_now(self, incarnation: str) -> bool:
        return incarnation in self.answering

    async def prove(self, worker, *, within_s: float) -> bool:
        return worker.incarnation in self.answering


@pytest.fixture
def proofs(members):
    proofs = Watched()
    members.rely_on(proofs)
    return proofs


async def test_worker_that_was_never_asked_is_offered_and_proven_first(members, proofs):
    members.update(snapshot(make_record("a")))
    assert offered(members) == {"a"}
    assert not await members.prove("a@1", within_s=0.0)
    proofs.answering.add("a@1")
    assert await members.prove("a@1", within_s=0.0)


def test_worker_that_does_not_answer_is_not_offered(members, proofs):
    members.update(snapshot(make_record("a"), make_record("b")))
    proofs.silent = frozenset({"a@1"})
    assert offered(members) == {"b"} == {worker.worker_id for worker in members.workers()}
    assert members.unusable == {"a@1"}
    proofs.silent = frozenset()
    assert offered(members) == {"a", "b"} == {worker.worker_id for worker in members.workers()}


def test_unlisted_worker_is_asked_and_stays_while_it_answers(members, proofs, clock):
    members.update(snapshot(make_record("a"), make_record("b")))
    assert proofs.unlisted == frozenset()
    for _ in range(100):
        members.update(snapshot(make_record("b")))
        assert names(members) == {"a@1", "b@1"}
        assert proofs.unlisted == {"a@1"}
        clock.advance(1.0)
        proofs.answering.add("a@1")
    proofs.answering.clear()
    members.update(snapshot(make_record("b")))
    assert names(members) == {"b@1"}


def test_unlisted_worker_that_never_answers_is_dropped(members, proofs, clock):
    members.update(snapshot(make_record("a"), make_record("b")))
    members.update(snapshot(make_record("b")))
    proofs.silent = frozenset({"a@1"})
    assert names(members) == {"b@1"}
    clock.advance(RETRY_LOST_AFTER_S)
    members.update(snapshot(make_record("b")))
    assert members.find("a@1") is None


@pytest.mark.parametrize("listed", [True, False])
def test_worker_that_answers_again_is_watched_without_the_fleet(members, proofs, listed):
    proofs.answering.update({"a@1", "b@1"})
    members.update(snapshot(make_record("a"), make_record("b")))
    if not listed:
        members.update(snapshot(make_record("b")))
    members.mark_dead("a@1")
    members.update(snapshot(*([make_record("a")] if listed else []), make_record("b")))
    assert proofs.workers == {"b@1"}
    members.mark_alive("a@1")
    assert proofs.again == [("a@1", not listed)]


async def test_proven_workers_are_not_asked_again(members, proofs, monkeypatch):
    members.update(snapshot(make_record("a"), make_record("b")))
    proofs.answering.add("a@1")
    asked = []

    async def prove(worker, *, within_s):
        asked.append(worker.incarnation)
        return False

    monkeypatch.setattr(proofs, "prove", prove)
    assert await members.unproven({"a@1"}) == frozenset()
    assert await members.unproven({"a@1", "b@1"}) == {"b@1"}
    assert asked == ["b@1"]


OUTSIDE = RELEASE + WINDOW + 1


async def test_worker_outside_the_window_gets_nothing(members):
    proofs = Watched()
    proofs.answering = {"a@1", "b@1"}
    members.rely_on(proofs)
    members.update(snapshot(make_record("a"), make_record("b", release=OUTSIDE)))
    assert names(members) == {"a@1"}
    assert members.unusable == {"b@1"}
    assert proofs.workers == {"a@1"}
    assert not await members.prove("b@1", within_s=0.0)
    assert {member.record.view.incarnation: member.skewed for member in members.members()} == {
        "a@1": False,
        "b@1": True,
    }


def test_worker_outside_the_window_is_named_in_the_log_once(members, caplog):
    for _ in range(3):
        members.update(snapshot(make_record("b", release=OUTSIDE)))
    (line,) = caplog.messages
    assert line.startswith(f"worker b@1 gets no requests: it is of release {OUTSIDE}, outside the window")


def test_worker_that_is_upgraded_is_offered(members):
    members.update(snapshot(make_record("b", release=OUTSIDE)))
    members.update(snapshot(make_record("b", number=2)))
    assert names(members) == {"b@2"}


async def test_worker_of_another_encoding_is_a_member_without_requests(members):
    one, other = "1" * 32, "2" * 32
    members.update(snapshot(make_record("a", encoding=one), make_record("b", encoding=other), make_record("c")))
    assert members.unusable == frozenset()
    members.require_encoding(one)
    assert names(members) == {"a@1", "b@1", "c@1"}, "a canary may name it, and one that reports none is of before"
    assert members.unusable == {"b@1"}
    assert {view.worker_id for view in members.offered()} == {"a", "c"}
    assert {view.worker_id for view in members.ready()} == {"a", "b", "c"}
    assert members.find_usable("b@1") is None
    candidates = members.candidates("mini", prompt_tokens=1, exclude=frozenset())
    assert {record.view.worker_id for record in candidates} == {"a", "c"}
