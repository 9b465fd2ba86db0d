"""Adapters that could not be loaded: for how long they are refused, and reported."""

from tandem_engine.engine.failed_loads import REFUSED_S, REPORTED_S, FailedLoads
from tandem_engine.messages.control import MAX_FAILED_ADAPTERS, MAX_FAILURE_TEXT, MAX_REFUSED_ADAPTERS
from tandem_engine.messages.requests import AdapterRef


def ref(number: int) -> AdapterRef:
    return AdapterRef(name=f"a{number}", digest=number.to_bytes(16, "big"), source="")


def test_failure_is_refused_for_a_while_and_reported_longer():
    failed = FailedLoads()
    failed.note(ref(1), "no such folder", now=100.0)
    assert failed.refusal(ref(1).digest, now=100.0 + REFUSED_S - 1) == "no such folder"
    assert failed.refusal(ref(1).digest, now=100.0 + REFUSED_S) is None
    assert [each.reason for each in failed.reported] == ["no such folder"]
    failed.expire(100.0 + REPORTED_S)
    assert failed.reported == ()


def test_repeated_failure_is_refused_again_with_its_reason():
    failed = FailedLoads()
    failed.note(ref(1), "no such folder", now=0.0)
    failed.note(ref(1), "r 128", now=REFUSED_S)
    assert failed.refusal(ref(1).digest, now=REFUSED_S + 1) == "r 128"
    assert [each.reason for each in failed.reported] == ["r 128"]


def test_each_change_of_a_report_is_counted():
    failed = FailedLoads()
    counts = [failed.changes]
    failed.note(ref(1), "no such folder", now=0.0)
    counts.append(failed.changes)
    failed.expire(REFUSED_S)
    counts.append(failed.changes)
    failed.forget(ref(1).digest)
    counts.append(failed.changes)
    failed.forget(ref(1).digest)
    assert counts == sorted(set(counts))
    assert failed.changes == counts[-1]


def test_reports_are_bounded_to_the_newest():
    failed = FailedLoads()
    for number in range(1, 2 * MAX_REFUSED_ADAPTERS + 1):
        failed.note(ref(number), "x" * 2 * MAX_FAILURE_TEXT, now=float(number) / 100)
    assert len(list(failed.refused)) == MAX_REFUSED_ADAPTERS
    newest = range(2 * MAX_REFUSED_ADAPTERS - MAX_FAILED_ADAPTERS + 1, 2 * MAX_REFUSED_ADAPTERS + 1)
    assert {each.name for each in failed.reported} == {f"a{number}" for number in newest}
    assert {len(each.reason) for each in failed.reported} == {MAX_FAILURE_TEXT}
