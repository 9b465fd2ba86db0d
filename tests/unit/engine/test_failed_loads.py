"""Adapters that could not be loaded: for how long they are refused, and reported."""

import msgspec
import pytest

from tandem_engine.engine.adapter_shelf import REFUSED_S, REPORTED_S, FailedLoads
from tandem_engine.messages.control import MAX_FAILED_ADAPTERS, MAX_FAILURE_TEXT, MAX_REFUSED_ADAPTERS, FailedAdapter
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


def test_reason_is_reported_on_one_line_that_can_be_encoded():
    failed = FailedLoads()
    failed.note(ref(1), "no file 'a\udcff\n\x1b[31m'", now=0.0)
    [report] = failed.reported
    assert report.reason == r"no file 'a\udcff\x0a\x1b[31m'"
    assert msgspec.json.decode(msgspec.json.encode(report), type=FailedAdapter) == report


def test_long_reason_stays_bounded_when_it_is_escaped():
    failed = FailedLoads()
    failed.note(ref(1), "\x1b" * MAX_FAILURE_TEXT, now=0.0)
    assert len(failed.reported[0].reason) == MAX_FAILURE_TEXT


@pytest.mark.parametrize("name", ["", "n" * 129, "a\udcff", "a\x1b"])
def test_failure_under_impossible_name_is_refused_not_reported(name):
    failed = FailedLoads()
    request = AdapterRef(name=name, digest=b"1" * 16, source="x")
    failed.note(request, "no name", now=0.0)
    assert failed.refusal(request.digest, now=1.0) == "no name"
    assert failed.reported == ()


def test_load_of_other_content_ends_reports_of_the_name():
    failed = FailedLoads()
    failed.note(AdapterRef(name="sql", digest=b"1" * 16), "other content", now=0.0)
    failed.note(AdapterRef(name="law", digest=b"2" * 16), "no such folder", now=0.0)
    failed.loaded("sql", b"3" * 16)
    assert [each.name for each in failed.reported] == ["law"]
