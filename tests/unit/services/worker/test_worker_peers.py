import pytest

from tandem_services.worker.peers import ASK_AGAIN_S, PeerWatch
from tandem_testing.service_clock import ServiceClock


@pytest.fixture
def clock():
    return ServiceClock()


@pytest.fixture
def watch(clock):
    return PeerWatch(clock=clock, own="me@1")


def members(*names: str) -> frozenset[str]:
    return frozenset(names)


def test_missing_member_is_probed_before_removal(watch):
    watch.update("e", members("me@1", "a@1", "b@1"))
    assert watch.update("e", members("me@1", "b@1")) == members()
    assert watch.due() == members("a@1")


def test_newer_incarnation_proves_end_of_older_one(watch):
    watch.update("e", members("me@1", "a@1", "b@1"))
    assert watch.update("e", members("me@1", "b@1", "a@2")) == members("a@1")
    assert watch.due() == members()


def test_older_incarnation_proves_nothing(watch):
    watch.update("e", members("a@10"))
    assert watch.update("e", members("a@9")) == members()
    assert watch.due() == members("a@10")


def test_unchanged_member_list_removes_no_member(watch):
    watch.update("e", members("a@1"))
    assert watch.update("e", None) == members()
    assert watch.due() == members()


def test_own_absence_from_member_list_is_ignored(watch):
    watch.update("e", members("me@1", "a@1"))
    assert watch.update("e", members("a@1")) == members()
    assert watch.due() == members()


def test_missing_member_that_answers_is_probed_again_later(watch, clock):
    watch.update("e", members("a@1"))
    watch.update("e", members())
    watch.answered("a@1")
    assert watch.due() == members()
    clock.advance(ASK_AGAIN_S)
    assert watch.due() == members("a@1")
    watch.update("e", members("a@1"))
    assert watch.due() == members()


def test_members_have_fencing_period_to_return_after_wipe(watch, clock):
    watch.update("first", members("a@1", "b@1"))
    watch.update("second", members("a@1"))
    clock.advance(9)
    assert watch.due() == members()
    clock.advance(2)
    assert watch.due() == members("b@1")
    watch.forget("b@1")
    assert watch.due() == members()


def test_member_back_after_wipe_is_not_probed_again(watch, clock):
    watch.update("first", members("a@1"))
    watch.update("second", members())
    watch.update("second", members("a@1"))
    clock.advance(60)
    assert watch.due() == members()


def test_new_incarnation_after_wipe_proves_end_of_old_one(watch):
    watch.update("first", members("a@1"))
    assert watch.update("second", members("a@2")) == members("a@1")


def test_suspect_that_no_list_names_is_due_after_a_while(watch, clock):
    """It lived between two heartbeats; its pages would stay in quarantine forever [poison-quarantined]."""
    watch.update("e", members("a@1"))
    watch.suspect(["short-lived@7", "a@1"])
    assert watch.due() == members()
    clock.advance(5)
    watch.suspect(["short-lived@7", "a@1"])
    clock.advance(6)
    assert watch.due() == members("short-lived@7")


def test_suspect_that_registers_late_is_kept(watch, clock):
    watch.update("e", members())
    watch.suspect(["late@1"])
    watch.update("e", members("late@1"))
    clock.advance(60)
    assert watch.due() == members()


def test_suspected_peer_is_fenced_by_its_new_incarnation(watch):
    watch.update("e", members())
    watch.suspect(["p@1"])
    assert watch.update("e", members("p@2")) == members("p@1")
