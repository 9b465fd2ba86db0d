"""Self-check: every page and row has exactly one owner.

Runs when the engine becomes idle; a problem is logged and counted, and serving goes on. With
`audit_every_step` it runs after each step and raises, which is for tests.
"""

import logging
from dataclasses import dataclass

from tandem_engine.config import SchedulerConfig
from tandem_engine.memory.conservation import ConservationReport, check_conservation
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.tally import Tally

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Health:
    """Audits on behalf of the scheduler."""

    config: SchedulerConfig
    memory: KvMemory
    queues: Queues
    tally: Tally
    was_idle: bool = True

    def audit(self) -> ConservationReport:
        """Collect the five sets of pages from their owners, now. Changes nothing."""
        live = [*self.queues.live()]
        kvs = [req.kv for req in live if req.kv is not None]
        swapped = [req.swapped for req in live if req.swapped is not None]
        return check_conservation(self.memory, kvs, self.queues.held_pages(), swapped)

    def after_turn(self, *, idle: bool) -> None:
        """Audit when the configuration or the occasion asks for it."""
        became_idle = idle and not self.was_idle
        self.was_idle = idle
        if self.config.audit_every_step:
            problems = self.audit().problems
            assert not problems, f"audit after step: {'; '.join(problems)}"
        elif became_idle:
            self._report(self.audit())

    def _report(self, report: ConservationReport) -> None:
        if report.problems:
            self.tally.audit_failures += 1
            logger.error("audit while idle: %s", "; ".join(report.problems))
