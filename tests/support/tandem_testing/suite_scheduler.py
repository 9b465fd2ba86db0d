"""How the suite is spread over workers of pytest-xdist: by file, long files first, and a worker may crash.

`--dist loadgroup` of xdist makes a unit of each test outside a group. Every fixture of a module is then built on every
worker, and the crash of a worker ends the run: the test that crashed it runs again, crashes the next worker, and the
scheduler gives work to a replacement that has not collected yet. Here

- a unit is a group (`xdist_group`), or else a file;
- the tests against a Kubernetes control plane begin first: they are one unit of ten minutes, and mostly wait. Then
  units with a test marked `slow`, so that no long unit is left for the end. Those that start processes, and wait for
  them, alternate with those that compute: else cores are idle in the first half of a run and short in the second;
- the test during which a worker crashed has failed and does not run again; the rest of the worker's units goes to the
  others.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tandem_testing.second_attempts import FOLDERS as WAITING

FIRST = ("kube", "slow")
"""Marks of units that begin before others."""


class SuiteScheduling(LoadScopeScheduling):
    """Units of work are groups and files, in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # by number of tests, which is not how long they take

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        """As xdist's, but for the test that ran while the worker crashed: it is not among what is left to do."""
        workload = self.assigned_work.pop(node)
        pending = [(unit, test) for unit, tests in workload.items() for test, done in tests.items() if not done]
        if not pending:
            return None
        unit, crashed = pending[0]
        workload[unit][crashed] = True
        # In front: what was begun is what was to begin first.
        for name in reversed(workload):
            if not all(workload[name].values()):
                self.workqueue[name] = workload[name]
                self.workqueue.move_to_end(name, last=False)
        for other in self.nodes:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        # The replacement of a crashed worker gets its first unit when it has collected: xdist calls `schedule` then.
        if node not in self.registered_collections:
            return
        super()._reschedule(node)
        # A worker runs a test when it knows the next one, or that there is none.
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)


def unit_of(nodeid: str) -> str:
    """The group that xdist wrote behind the id, if any, or else the file."""
    if nodeid.rfind("@") > nodeid.rfind("]"):
        return nodeid.rpartition("@")[2]
    return nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SuiteScheduling | None:
    return SuiteScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On workers of xdist, which hand out units in the order in which they were collected."""
    if hasattr(config, "workerinput"):
        places = {unit: place for place, unit in enumerate(_begun_in_order(items))}
        items.sort(key=lambda item: places[unit_of(item.nodeid)])


def _begun_in_order(items: Sequence[pytest.Item]) -> list[str]:
    """All units: of each mark of `FIRST`, then the others as they were collected."""
    collected = {unit_of(item.nodeid): item.nodeid.startswith(WAITING) for item in items}
    ordered: dict[str, None] = {}
    for name in FIRST:
        marked = {unit_of(item.nodeid) for item in items if item.get_closest_marker(name)}
        units = [unit for unit in collected if unit in marked and unit not in ordered]
        wait, compute = [u for u in units if collected[u]], [u for u in units if not collected[u]]
        ordered |= dict.fromkeys(_mixed(wait, compute))
    return [*(ordered | dict.fromkeys(collected))]


def _mixed(some: Sequence[str], others: Sequence[str]) -> list[str]:
    """Both in their order, each spread evenly over the whole."""
    placed = [((index + 0.5) / len(part), unit) for part in (some, others) for index, unit in enumerate(part)]
    return [unit for _, unit in sorted(placed, key=lambda pair: pair[0])]
