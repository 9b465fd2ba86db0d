"""Faults at run time: which request broke a step, and whether every page still has one owner.

`Isolation` reruns the requests of a failed step apart until the one that breaks it is alone.

    1. raised    a step raised. The step launched on top of it is void too: it may have read KV that was never written
    2. suspects  its requests leave their queues, keep row and pages, and return to their last committed token.
                 They form two groups, or one when there is a single request
    3. trials    each step runs one group alone, over what the failed step was to compute
    4. outcome   a group whose trial raises is split again; a request that gets its token returns to the running ones;
                 a request that raises alone for the second time at one token fails with the error

Where layers keep states, which a failed step has changed, a suspect begins again at its last anchor.

All other requests wait in the meantime and keep their memory. An incident of n requests costs at most 3n failed steps
and takes no page from another request. No request is recomputed further back than its last committed token, and pages
that are being sent to a peer stay where they are [settled-only-sent]. A suspect is in `Queues.requests` and in its
group, and in no queue [one-home].

`Health` audits pages and rows when the engine becomes idle after work, in at most a thousandth of the time: an audit
reads every page (about 5 ms for 12,700), and a request that arrives during it waits. A problem is logged and counted,
and serving continues. With `audit_every_step`, for tests, it runs after each step and raises.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem_engine.base.errors import OutOfPagesError
from tandem_engine.config import SchedulerConfig
from tandem_engine.executor.interface import StepFault, fault_of
from tandem_engine.memory.audit import ConservationReport, check_conservation
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.scheduler.counters import Tally
from tandem_engine.scheduler.finishing import Endings, error_finish
from tandem_engine.scheduler.prefill_adder import Extend
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request, sends_kv

logger = logging.getLogger(__name__)


class Suspect(NamedTuple):
    """A step of `req` alone raised when it had `tokens`, and KV of `committed` of them had settled."""

    req: Request
    tokens: int
    committed: int


@dataclass(kw_only=True, slots=True)
class Isolation:
    """Suspects of failed steps, and what they compute next."""

    config: SchedulerConfig
    memory: KvMemory
    queues: Queues
    endings: Endings
    tally: Tally
    groups: deque[list[Request]] = field(default_factory=deque)
    """In the order in which they are tried. None is empty."""
    suspect: Suspect | None = None
    """The newest step that raised with a single request in it."""

    @property
    def active(self) -> bool:
        """Whether a suspect has to be tried before anything else runs."""
        return bool(self.groups)

    def suspects(self) -> Iterator[Request]:
        """Every request whose home is here."""
        for group in self.groups:
            yield from (req for req in group if req.finished is None)

    def isolate(self, members: Sequence[Request], bystanders: Sequence[Request], error: BaseException) -> None:
        """The step of `members` raised `error`; that of `bystanders` was on top of it. Nothing is in flight."""
        self._take_out({*members, *bystanders})
        settled = [0 if req.kv is None else req.kv.committed_len for req in members]
        # A request in both was launched again before its step was known to have failed.
        others = [req for req in bystanders if req not in {*members}]
        live, bystanding = self._rewound(members), self._rewound(others)
        if bystanding:
            self.groups.appendleft(bystanding)
        if len(live) == 1:
            self._suspect_alone(live[0], settled[members.index(live[0])], error)
        elif live:
            half = len(live) // 2
            self.groups.appendleft(live[half:])
            self.groups.appendleft(live[:half])

    def trial(self) -> list[Extend]:
        """The next step of the first group. Empty without suspects, or while a step of theirs has to complete first."""
        while self.groups:
            group = [req for req in self.groups.popleft() if req.finished is None]
            extends = self._extends(group)
            rest = [req for req in group if req.kv is not None and req.launched_len < req.extend_target]
            for extend in extends:
                if extend.samples:
                    rest.remove(extend.req)
                    self._house(extend.req)
            if rest:
                self.groups.appendleft(rest)
            if extends or rest:
                return extends
        return []

    def drop(self, requests: Iterable[Request]) -> None:
        """`requests` have another home now."""
        members = {*requests}
        kept = ([req for req in group if req not in members] for group in self.groups)
        self.groups = deque(group for group in kept if group)

    def _take_out(self, members: set[Request]) -> None:
        """Out of every queue, earlier groups included."""
        self.queues.running = [req for req in self.queues.running if req not in members]
        if self.queues.chunked in members:
            self.queues.chunked = None
        self.drop(members)

    def _rewound(self, requests: Sequence[Request]) -> list[Request]:
        """Those that continue, at their last settled token. A pending finish that came in the meantime takes effect."""
        live = []
        for req in requests:
            if req.finished is not None:
                continue
            if req.to_finish is not None:
                self.memory.distrust(req.held_kv)
                self.endings.finish(req, req.to_finish)
                continue
            # The failed step may have changed the state of its rows on the device.
            req.kv = self._renewed(req)
            req.launched_len = req.kv.committed_len
            req.extend_target = req.seq_len
            live.append(req)
        return live

    def _renewed(self, req: Request) -> RequestKv:
        if not self.memory.stateful:
            return self.memory.renew(req.held_kv)
        tokens = req.token_ids(0, req.seq_len)
        return self.memory.begin_again(req.held_kv, tokens, max_match=req.longest_match)

    def _suspect_alone(self, req: Request, committed: int, error: BaseException) -> None:
        """Once may be chance."""
        suspect = Suspect(req, req.seq_len, committed)
        if suspect == self.suspect:
            self.suspect = None
            self._fail_poison(req, error)
        else:
            self.suspect = suspect
            self.groups.appendleft([req])

    def _fail_poison(self, req: Request, error: BaseException) -> None:
        start, stop = req.launched_len, req.extend_target
        logger.error(
            "poison request %s failed: the model step over its tokens %d to %d raises on every attempt",
            req.rid,
            start,
            stop,
            exc_info=error,
            extra={"fields": {**req.about, "step": self.tally.launched}},
        )
        self.tally.poison_requests += 1
        what = f"request {req.rid}: the model step over its tokens {start} to {stop} raised {type(error).__name__}"
        if fault_of(error) is StepFault.OUT_OF_MEMORY:
            finish = Finish(reason=FinishReason.ERROR, error=f"{what}, alone", code="out_of_memory", retryable=True)
        else:
            finish = Finish(reason=FinishReason.ERROR, error=what, code="engine_error", retryable=False)
        # Nothing of it enters the cache: what broke the step may be in its pages.
        self.endings.finish(req, finish, checkpoint=False)

    def _extends(self, group: Sequence[Request]) -> list[Extend]:
        """As much of the group as one step may compute."""
        extends = []
        budget = self.config.prefill_budget(decodes=0)
        for req in group:
            start = req.launched_len
            chunk = min(budget, self.config.chunk_limit(decodes=0), req.extend_target - start)
            if chunk == 0:
                break
            if not self.memory.ensure(req.held_kv, start + chunk):
                if req.steps_in_flight:
                    break  # its window may pass pages when that step has completed [settle-before-retract]
                self._release_request(req)
                continue
            budget -= chunk
            extends.append(Extend(req=req, start=start, stop=start + chunk))
        return extends

    def _house(self, req: Request) -> None:
        """Return a request that gets its token in this step to the running ones, unless its KV is sent elsewhere."""
        if not sends_kv(req):
            self.queues.running.append(req)

    def _release_request(self, req: Request) -> None:
        """No pages for the rest of its prompt: the waiting requests have them. It waits for pages in the queue."""
        if sends_kv(req):
            error = OutOfPagesError(f"request {req.rid} ended early: no KV page was left for the rest of its prompt")
            self.endings.finish(req, error_finish(error))
            return
        self.endings.release(req, checkpoint=True)
        self.queues.waiting.return_to_head(req)
        self.tally.retracted += 1


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
        held_rows = [*self.queues.held_rows()]
        return check_conservation(self.memory, kvs, self.queues.held_pages(), swapped, held_rows=held_rows)

    def after_turn(self, *, idle: bool) -> None:
        """Audit if the configuration or the situation requires it."""
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
