"""Skips for one reason are one line of pytest's report, which adds up those of one place."""

import pytest


def at_one_place(report: pytest.TestReport, reason: str, place: str) -> pytest.TestReport:
    """`report`, said to be from `place` (a file) if it tells of a test that was skipped for `reason`."""
    if report.skipped and isinstance(report.longrepr, tuple) and reason in report.longrepr[2]:
        report.longrepr = (place, None, report.longrepr[2])
    return report
