"""Which incarnation of a worker is listened to."""

import pytest

from tandem_engine.base.errors import WireError
from tandem_engine.disaggregation.peers import Incarnations, Observation
from tandem_engine.messages.requests import Peer
from tandem_testing.disagg_network import make_peer


def test_first_incarnation_is_accepted():
    assert Incarnations().observe(make_peer("a", 5)) == Observation(accepted=True)


def test_newer_incarnation_supersedes_the_older_one_once():  # [dead-peer-released]
    seen = Incarnations()
    seen.observe(make_peer("a", 5))
    assert seen.observe(make_peer("a", 7)) == Observation(accepted=True, superseded="a@5")
    assert seen.observe(make_peer("a", 7)) == Observation(accepted=True)


def test_superseded_incarnation_is_never_listened_to_again():
    seen = Incarnations()
    seen.observe(make_peer("a", 7))
    assert not seen.observe(make_peer("a", 5)).accepted
    assert seen.is_superseded(make_peer("a", 5))
    assert not seen.is_superseded(make_peer("a", 7))


def test_workers_do_not_supersede_each_other():
    seen = Incarnations()
    seen.observe(make_peer("a", 7))
    assert seen.observe(make_peer("b", 1)) == Observation(accepted=True)


def test_worker_id_may_contain_the_separator():
    assert Incarnations().observe(make_peer("pod@host", 3)).accepted


@pytest.mark.parametrize(
    "incarnation", ["a", "a@", "b@1", "a@x", "a@-1", "a@1@1", "@1", "a@\N{ARABIC-INDIC DIGIT ONE}"]
)
def test_names_that_contradict_each_other_are_refused(incarnation):
    peer = Peer(worker_id="a", incarnation=incarnation, endpoint="", compat_hash="")
    with pytest.raises(WireError, match="worker 'a'"):
        Incarnations().observe(peer)


def test_numbers_as_long_as_a_worker_draws_them_are_known():
    # Microseconds shifted by twelve bits: 19 digits (`tandem_services.worker.config.new_incarnation`).
    seen = Incarnations()
    assert seen.observe(make_peer("a", 7353120427461185208)).accepted
