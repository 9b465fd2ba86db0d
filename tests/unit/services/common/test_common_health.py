"""Readiness: every check, and draining before all."""

from tandem_services.common.health import Health, HealthReport


def test_all_checks_must_pass():
    health = Health()
    assert health.report() == HealthReport(status="ok")
    health.add_check("redis", lambda: None)
    health.add_check("workers", lambda: "none registered")
    report = health.report()
    assert report == HealthReport(status="unavailable", reasons=("workers: none registered",))
    assert report.http_status == 503


def test_draining_process_is_not_ready_with_passing_checks():
    health = Health()
    health.drain()
    assert health.report().status == "draining"
    assert not health.report().ok
