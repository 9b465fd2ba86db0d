"""Pages about faults say what is tested: every scenario has its row, with its bound, and every metric named exists."""

import re
from collections.abc import Iterator
from itertools import dropwhile, islice, takewhile
from pathlib import Path

import pytest

from tandem_testing.chaos.catalogue import PROMISES
from tandem_testing.chaos.suite import scenarios
from tandem_testing.exported_metrics import gateway_metrics, labels_of_series, router_metrics, worker_metrics

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs").glob("*.md"))
NO_FAULT_OF_THEIR_OWN = {0, 56}
"""The yardstick, and a mixture of others."""
METRIC = re.compile(r"\btandem_(?:gateway|worker|link)_\w*[a-z]")
NUMBERS = re.compile(r"(\d+)(?:–(\d+))?")


def rows(page: str, heading: str) -> Iterator[list[str]]:
    """Cells of the first table below `heading`, without its head."""
    below = (ROOT / "docs" / page).read_text("utf-8").partition(f"\n## {heading}\n")[2].splitlines()
    table = dropwhile(lambda line: not line.startswith("|"), below)
    for line in islice(takewhile(lambda line: line.startswith("|"), table), 2, None):
        yield [cell.strip() for cell in line.strip("|").split("|")]


def numbers(cell: str) -> set[int]:
    return {n for first, last in NUMBERS.findall(cell) for n in range(int(first), int(last or first) + 1)}


def test_every_scenario_is_on_its_page_with_its_bound():
    quick = {number for number, each in scenarios().items() if each.quick}
    shown = {int(row[0]): (row[3], row[4] == "quick") for row in rows("chaos.md", "Scenarios")}
    promised = {
        line.number: ("" if line.bound_s is None else f"{line.bound_s:g} s", line.number in quick) for line in PROMISES
    }
    assert shown == promised


def test_faults_page_covers_every_scenario_with_its_signals():
    faults = list(rows("faults.md", "What happens when …"))
    reported = set().union(*(numbers(scenario) for _, scenario, _, _ in faults))
    assert reported == {line.number for line in PROMISES} - NO_FAULT_OF_THEIR_OWN
    assert [fault for fault, _, seen, shown in faults if not (seen and shown)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_metric_that_a_page_names_is_exported(page):
    exported = [*gateway_metrics(), *worker_metrics(), *router_metrics()]
    known = set(labels_of_series(exported)) | {metric.name for metric in exported}
    assert set(METRIC.findall(page.read_text("utf-8"))) - known == set()
