"""The audit."""

import pytest

from tandem_testing.scheduler_builders import make_engine, make_message


def test_a_leak_is_logged_and_counted_when_the_engine_becomes_idle(caplog):
    engine = make_engine(audit_every_step=False)
    engine.memory.reserve_pages(1)
    engine.add(make_message(max_tokens=2))
    engine.run()
    assert "leaked" in caplog.text
    assert engine.scheduler.stats().audit_failures_total == 1
    engine.assert_expected()


def test_an_idle_engine_is_audited_once():
    engine = make_engine(audit_every_step=False)
    engine.memory.reserve_pages(1)
    engine.add(make_message(max_tokens=2))
    engine.run()
    engine.step(5)
    assert engine.scheduler.stats().audit_failures_total == 1


def test_tests_can_have_every_step_audited():
    engine = make_engine(audit_every_step=True)
    engine.memory.reserve_pages(1)
    with pytest.raises(AssertionError, match="leaked"):
        engine.step()


def test_the_audit_sees_requests_in_every_home():  # [one-home]
    engine = make_engine(chunked_prefill_size=4, max_prefill_tokens=8, enable_overlap=True)
    engine.add(make_message("running", [1, 2], max_tokens=9))
    engine.add(make_message("chunked", range(1, 20), max_tokens=9))
    engine.step(2)
    assert engine.scheduler.queues.chunked is not None
    report = engine.scheduler.audit()
    assert (report.problems, report.requests) == ((), 2)
