"""A test of real processes that fails runs once more, and the summary shows why its first attempt failed.

One such test in sixteen thousand fails now and then on a busy machine, and would cost the whole run. But no failure is
hidden:

    first attempt passes   the test has passed
    first attempt fails    it is reported as RERUN, with its traceback. Fixtures of the function end; those of the
                           module and the session stay. The second attempt decides
    timeout                the test has failed: what hangs may hang again. One timeout covers both attempts
    after MOST reruns      in one process, a test that fails has failed: something is broken

Only tests in FOLDERS have a second attempt; all others are deterministic. pytest-rerunfailures does the same, but a
test that has timed out runs again without a timeout.
"""

import gc
import sys
import warnings
from typing import Any

import pytest
from _pytest.runner import call_and_report

FOLDERS = ("tests/chaos/", "tests/front_door/", "tests/integration/", "tests/kube/")
MOST = 3

RERUN = "rerun"
"""Outcome of a report that does not decide."""
RERUNS = pytest.StashKey[int]()


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not item.nodeid.startswith(FOLDERS) or item.config.stash.get(RERUNS, 0) >= MOST:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    if not _attempt(item, nextitem, decides=False):
        item.config.stash[RERUNS] = item.config.stash.get(RERUNS, 0) + 1
        _forget_failed_fixtures(item)
        _collect_garbage()
        _attempt(item, nextitem, decides=True)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _attempt(item: Any, nextitem: pytest.Item | None, *, decides: bool) -> bool:
    """As pytest's `runtestprotocol`. Returns whether it has decided; if not, fixtures of the module have not ended."""
    if not item._request:
        item._initrequest()
    report = _phase(item, "setup", decides=decides)
    if report.passed:
        report = _phase(item, "call", decides=decides)
    decides = report.outcome != RERUN
    if item.session.shouldfail or item.session.shouldstop:
        nextitem = None
    # The node's parent stands for a next test that shares its module.
    _phase(item, "teardown", decides=decides, nextitem=nextitem if decides else item.parent)
    item._request = False
    item.funcargs = None
    return decides


def _phase(item: pytest.Item, when: str, *, decides: bool, **arguments: object) -> pytest.TestReport:
    report = call_and_report(item, when, log=False, **arguments)
    if report.failed and not decides and "from pytest-timeout" not in report.longreprtext:
        report.outcome = RERUN
    item.ihook.pytest_runtest_logreport(report=report)
    return report


def _forget_failed_fixtures(item: Any) -> None:
    """pytest keeps the exception of a fixture that outlives the test, for all tests that use it."""
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        for definition in definitions:
            if definition.cached_result is not None and definition.cached_result[2] is not None:
                definition.cached_result = None


def _collect_garbage() -> None:
    """What the failed attempt has left open would be an error of the test during which it is collected."""
    for name in {"last_exc", "last_type", "last_value", "last_traceback"} & vars(sys).keys():
        delattr(sys, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    return (RERUN, "R", "RERUN") if report.outcome == RERUN else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.getreports(RERUN)
    if not reports:
        return
    terminalreporter.section("reruns: bugs to mend")
    for report in reports:
        terminalreporter.section(f"RERUN {report.nodeid}", "_")
        terminalreporter.write_line(report.longreprtext)
        for title, content in report.sections:
            terminalreporter.section(title, "-")
            terminalreporter.write_line(content)
