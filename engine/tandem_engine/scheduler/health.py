"""Self-check: every page and row has exactly one owner.

Runs when the engine is idle after work, in at most a thousandth of the time: it looks at every page, and a request that
comes meanwhile waits for it (12,700 pages take some 5 ms). A problem is logged and counted, and serving continues. With
`audit_every_step` it runs after each step and raises, which is for tests.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem_engine.config import SchedulerConfig
from tandem_engine.memory.conservation import ConservationReport, check_conservation
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.tally import Tally

logger = logging.getLogger(__name__)

IDLE_SHARE = 1e-3
"""Of the time that audits of an idle engine take, at most."""


@dataclass(kw_only=True, slots=True)
class Health:
    """Audits on behalf of the scheduler."""

    config: SchedulerConfig
    memory: KvMemory
    queues: Queues
    tally: Tally
    clock: Callable[[], float] = time.perf_counter
    _due: bool = False
    """Whether there was work since the last audit."""
    _earliest: float = float("-inf")
    """When the next audit of an idle engine may run."""

    def audit(self) -> ConservationReport:
        """Collect the five sets of pages from their owners, now. Changes nothing."""
        live = [*self.queues.live()]
        kvs = [req.kv for req in live if req.kv is not None]
        swapped = [req.swapped for req in live if req.swapped is not None]
        return check_conservation(self.memory, kvs, self.queues.held_pages(), swapped)

    def after_turn(self, *, idle: bool) -> None:
        """Audit when the configuration or the occasion asks for it."""
        if self.config.audit_every_step:
            problems = self.audit().problems
            assert not problems, f"audit after step: {'; '.join(problems)}"
            return
        self._due |= not idle
        if idle and self._due and self.clock() >= self._earliest:
            self._audit_idle()

    def _audit_idle(self) -> None:
        began = self.clock()
        self._report(self.audit())
        ended = self.clock()
        self._due, self._earliest = False, ended + (ended - began) / IDLE_SHARE

    def _report(self, report: ConservationReport) -> None:
        if report.problems:
            self.tally.audit_failures += 1
            logger.error("audit while idle: %s", "; ".join(report.problems))
