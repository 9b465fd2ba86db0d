"""The audit."""

import pytest

from tandem_engine.memory.audit import ConservationReport
from tandem_testing.scheduler_builders import make_engine, make_message


def test_leak_is_logged_and_counted_when_the_engine_becomes_idle(caplog):
    engine = make_engine(audit_every_step=False)
    engine.memory.reserve_pages(1)
    engine.add(make_message(max_tokens=2))
    engine.run()
    assert "leaked" in caplog.text
    assert engine.scheduler.stats().audit_failures_total == 1
    engine.assert_expected()


def test_idle_engine_is_audited_once():
    engine = make_engine(audit_every_step=False)
    engine.memory.reserve_pages(1)
    engine.add(make_message(max_tokens=2))
    engine.run()
    engine.step(5)
    assert engine.scheduler.stats().audit_failures_total == 1


def test_audits_of_an_idle_engine_take_a_thousandth_of_its_time():
    engine, now = make_engine(audit_every_step=False), [0.0]
    health = engine.scheduler._parts.health
    health.clock = lambda: now[0]
    audited = []

    def report(_: object, found: ConservationReport) -> None:
        assert not found.problems
        audited.append(now[0])
        now[0] += 0.01

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(health), "_report", report)
        for began in (1.0, 2.0, 10.9, 11.1):
            now[0] = began
            health.after_turn(idle=False)
            health.after_turn(idle=True)
            health.after_turn(idle=True)
    assert audited == [1.0, 11.1]


def test_tests_can_have_every_step_audited():
    engine = make_engine(audit_every_step=True)
    engine.memory.reserve_pages(1)
    with pytest.raises(AssertionError, match="leaked"):
        engine.step()


def test_audit_sees_requests_in_every_home():  # [one-home]
    engine = make_engine(chunked_prefill_size=4, max_prefill_tokens=8, enable_overlap=True)
    engine.add(make_message("running", [1, 2], max_tokens=9))
    engine.add(make_message("chunked", range(1, 20), max_tokens=9))
    engine.step(2)
    assert engine.scheduler.queues.chunked is not None
    report = engine.scheduler.audit()
    assert (report.problems, report.requests) == ((), 2)
