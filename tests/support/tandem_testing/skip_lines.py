"""Skips for one reason are one line of pytest's report, which adds up those of one place."""

import pytest


def at_one_place(report: pytest.TestReport, reason: str, place: str) -> pytest.TestReport:
    """`report`, with `place` (a file) as its place if a test was skipped for `reason`."""
    if report.skipped and isinstance(report.longrepr, tuple) and reason in report.longrepr[2]:
        report.longrepr = (place, None, report.longrepr[2])
    return report
