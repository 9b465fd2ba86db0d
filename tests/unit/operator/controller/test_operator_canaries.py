"""When canaries are sent, and what their answers mean for readiness and rollouts."""

from dataclasses import replace

import pytest

from tandem_operator.controller.canary_runner import BAD_IN_A_ROW, REPEAT_S, RETRY_S, RevisionCanaries, steady
from tandem_operator.planning.observed import Canary
from tandem_operator.telemetry.pods import PodSeen

GATEWAY = PodSeen(name="g", uid="g", ip="10.0.0.1", role="gateway", ready=True)
PREFILL = PodSeen(name="p", uid="p", ip="10.0.0.2", role="prefill", revision="r1", ready=True)
DECODE = PodSeen(name="d", uid="d", ip="10.0.0.3", role="decode", revision="r1", ready=True)
ALL = (GATEWAY, PREFILL, DECODE)
GOOD, BAD = Canary(passed=True), Canary(passed=False, message="502 after 1.5 s")


@pytest.fixture
def book():
    return RevisionCanaries(timeout_s=600.0)


def asked(book, now, pods=ALL):
    return {ask.revision for ask in book.due(now, pods)}


def answer(book, now, canary, pods=ALL, *names):
    for ask in book.due(now, pods):
        if not names or ask.revision in names:
            book.take(now, ask, canary)


@pytest.mark.parametrize("missing", ALL, ids=lambda pod: pod.role)
@pytest.mark.parametrize("change", [{"ready": False}, {"terminating": True}])
def test_no_canary_without_gateway_and_ready_pair(book, missing, change):
    pods = [replace(pod, **change) if pod is missing else pod for pod in ALL]
    assert asked(book, 0.0, pods) == set()


def test_canary_of_a_revision_names_its_pair(book):
    (pair,) = [ask.pair for ask in book.due(0.0, ALL) if ask.revision == "r1"]
    assert pair == (PREFILL, DECODE)
    assert [ask.pair for ask in book.due(0.0, ALL) if ask.revision == ""] == [None]


def test_workers_of_different_revisions_are_no_canary_pair(book):
    assert asked(book, 0.0, (GATEWAY, PREFILL, replace(DECODE, revision="r2"))) == set()


def test_revision_canary_repeats_until_passed_gateway_forever(book):
    answer(book, 0.0, BAD)
    assert asked(book, RETRY_S - 0.1) == set()
    assert asked(book, RETRY_S) == {"r1", ""}
    answer(book, RETRY_S, GOOD)
    assert asked(book, RETRY_S + REPEAT_S - 0.1) == set()
    assert asked(book, RETRY_S + REPEAT_S) == {""}
    assert book.results(40.0, ["r1"]) == {"r1": GOOD, "": GOOD}


def test_one_bad_answer_in_between_is_no_outage_and_several_are(book):
    answer(book, 0.0, GOOD)
    now = REPEAT_S
    for _ in range(BAD_IN_A_ROW - 1):
        answer(book, now, BAD)
        assert book.results(now, ["r1"])[""] == GOOD
        now += RETRY_S
    answer(book, now, BAD)
    assert book.results(now, ["r1"])[""] == BAD
    answer(book, now + RETRY_S, GOOD)
    assert book.results(now + RETRY_S, ["r1"])[""] == GOOD


def test_revision_without_a_pair_fails_when_its_time_is_over(book):
    assert book.results(0.0, ["r1"]) == {}
    assert book.results(600.0, ["r1"]) == {}
    failed = book.results(600.1, ["r1"])["r1"]
    assert not failed.passed
    assert failed.message == "no pair of the revision responded within 600 s"


def test_revisions_that_are_gone_are_forgotten(book):
    answer(book, 0.0, GOOD)
    assert book.results(1.0, []) == {"": GOOD}
    assert asked(book, 2.0) == {"r1"}


def test_message_is_kept_if_only_numbers_differ(book):
    """Else a status would be written for each attempt."""
    answer(book, 0.0, BAD)
    answer(book, RETRY_S, replace(BAD, message="502 after 27.9 s"))
    assert book.results(RETRY_S, ["r1"])["r1"].message == BAD.message
    assert steady("metrics are 16 s old", "metrics are 21.5 s old") == "metrics are 16 s old"
    assert steady("metrics are 16 s old", "") == ""
