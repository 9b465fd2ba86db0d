"""Late binding: a new request waits at the gateway, not at a worker, until a worker has capacity for it.

    1. arrives    the queue is empty, or the request goes first: the router is queried at once, and a worker with
                  capacity gets the request
    2. queued     otherwise it takes one of a bounded number of seats (`FairQueue`)
    3. tried      the head of line queries the router whenever a request has ended or an interval has passed. A request
                  that no worker can serve is skipped for `PASSED_OVER_S`. One that lacks capacity is passed only by
                  requests that use other workers (`lanes`), or long prompts would wait forever
    4. admitted   with a worker, and charged to its tenant
       rejected   replaced by a tenant with fewer seats, or after `room_s` without capacity, or after `worker_s`
                  without any worker: 429 or 503 with Retry-After. While a worker that it lacks starts, and for
                  `worker_s` after that, it waits on, for `start_s` altogether (`WorkerStarts`)

A worker has capacity when the sequence need not wait for others to end, and the prompt waits at most `worker_wait_s`
for other prompts: the worker stays busy, without its own queue. A tenant that is behind may do more
(`precedence`): its request is tried at once, may find more prompts at a worker, and may go to one without a free place.

`Turnover` counts slots that were freed but are not in a worker's report yet, which may be a second old. A slot that a
request of this gateway freed, or that another gateway offered, counts at once. It expires after `UNREPORTED_S`: by then
a report contains it, or another gateway has used it.

`LateBinding` also applies fairness between gateways (`HeadYield`). It never waits: `Admission` or a simulator calls it.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tandem_engine.base.clock import Clock
from tandem_services.common.errors import ApiError
from tandem_services.common.recording import estimating
from tandem_services.common.tasks import BackgroundTasks, run_periodically
from tandem_services.gateway.access.tenants import Tenant
from tandem_services.gateway.queueing.fair_queue import (
    SYNC_S,
    FairQueue,
    HeadYield,
    SharedCounters,
    queue_head,
)
from tandem_services.gateway.queueing.lanes import BlockedLanes, Lane
from tandem_services.gateway.queueing.precedence import Precedence
from tandem_services.gateway.queueing.queue_entry import Answer, Ask, QueueEntry, Verdict, refusal
from tandem_services.gateway.queueing.queue_timeouts import AdmissionPolicy, QueueTimeouts
from tandem_services.gateway.queueing.turnover import Pace, Turnover
from tandem_services.gateway.queueing.worker_starts import WorkerStarts
from tandem_services.router.decision import NoWorkersError, OtherCell, RouteDecision, WorkerView
from tandem_services.router.scoring import has_to_wait, prefill_wait_s
from tandem_services.router.shared_state import QueueHead
from tandem_services.router.usage_counters import OUTPUT_WEIGHT, prompt_cost

NEXT_S = 0.001
"""Until a new request that is first in line is tried: by then the other choices of its request have come."""

logger = logging.getLogger(__name__)

TRIES_PER_ROUND = 4
"""Requests that no worker can take which are skipped before the next iteration."""

MAX_PASSED = 16
"""Requests that lack capacity which are passed before the next iteration."""

PASSED_OVER_S = 0.5


class Chooser(Protocol):
    """What the queue needs of the router; see `Router`."""

    async def release(self, decision: RouteDecision) -> None: ...

    def workers(self) -> tuple[WorkerView, ...]: ...


class Observer(Protocol):
    """Receives what happens in the queue; see `QueueMetrics`."""

    def note_demand(self, prompt_tokens: int, *, gap_s: float) -> None:
        """A request has come, so long after the one before it; 0 for the first."""

    def admitted(self, wait_s: float, *, prompt_tokens: int, matched_tokens: int) -> None:
        """It has a worker, which is predicted to have `matched_tokens` of its tokens cached."""

    def refused(self, reason: str) -> None:
        """It has none: full, pushed_out, no_worker or no_room."""

    def start_awaited(self, wait_s: float, *, served: bool) -> None:
        """It has waited for a worker that starts, `wait_s` altogether, and was `served` by one."""

    def waiting(self, lengths: Mapping[str, int]) -> None:
        """How many wait, by tenant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueFigures:
    """A queue as it is."""

    prompt_tokens: int
    oldest_wait_s: float
    held: int
    """Requests that no worker can serve, as opposed to those that wait for capacity."""


@dataclass(kw_only=True, slots=True)
class LateBinding:
    """One per model service; belongs to its event loop."""

    chooser: Chooser
    clock: Clock
    queue: FairQueue[QueueEntry]
    counters: SharedCounters
    observer: Observer
    policy: AdmissionPolicy
    prefill_rate: Callable[[], float] = lambda: 0.0
    """Prompt tokens per second of the fleet; 0 where that is not known."""
    starts: WorkerStarts | None = None
    """None: workers that start are not known."""
    _way: HeadYield = field(init=False)
    _turnover: Turnover = field(init=False)
    _precedence: Precedence = field(init=False)
    _asked_at: float | None = None
    """When the last request came."""
    _timeouts: QueueTimeouts = field(init=False)
    _late_from: float = float("-inf")
    """When requests are looked at for their timeouts again: looking at a thousand in each turn would keep the event
    loop from others."""
    _of_adapters: set[QueueEntry] = field(default_factory=set)
    """Those in the queue that are for an adapter."""
    _blocked: BlockedLanes = field(default_factory=BlockedLanes)
    """Of the last round."""
    _pace: Pace = field(init=False)
    _background: BackgroundTasks = field(default_factory=BackgroundTasks)

    def __post_init__(self) -> None:
        self._timeouts = QueueTimeouts(clock=self.clock, policy=self.policy, starts=self.starts)
        self._way = HeadYield(clock=self.clock)
        self._turnover = Turnover(clock=self.clock)
        self._precedence = Precedence(clock=self.clock)
        self._pace = Pace(clock=self.clock)

    def figures(self) -> QueueFigures:
        """The queue as it is."""
        now = self.clock.now()
        waiting = [*self.queue]
        return QueueFigures(
            prompt_tokens=sum(entry.prompt_tokens for entry in waiting),
            oldest_wait_s=max((now - entry.arrived for entry in waiting), default=0.0),
            held=sum(entry.verdict is Verdict.NO_WORKER for entry in waiting),
        )

    @estimating(lambda *_, **__: 0.0)
    def expected_wait_s(self, *, tenant: Tenant, priority: int, prompt_tokens: int) -> float:
        """Predicted time in the queue of a request that comes now: until what is served before it has workers."""
        if not self.queue:
            return 0.0
        cost = prompt_cost(prompt_tokens, 0) / tenant.weight
        ahead = self.queue.ahead(tenant.name, priority=priority, cost=cost)
        rate = self.prefill_rate()
        computed_s = sum(entry.prompt_tokens for entry in ahead) / rate if rate > 0.0 else 0.0
        return self._timeouts.until_start_s() + max(computed_s, self._pace.delay_s(len(ahead)))

    def has_lacked_workers_since(self, at: float) -> bool:
        """Whether a request that came at `at` has waited for a worker to start or to return."""
        return self._timeouts.has_lacked_since(at)

    def entry(
        self,
        ask: Ask,
        decision: Answer,
        *,
        tenant: Tenant,
        priority: int,
        prompt_tokens: int,
        lane: Lane | None = None,
    ) -> QueueEntry:
        """A new request, which is to `arrive`."""
        return QueueEntry(
            tenant=tenant.name,
            weight=tenant.weight,
            priority=priority,
            arrived=self.clock.now(),
            prompt_tokens=prompt_tokens,
            cost=prompt_cost(prompt_tokens, 0) / tenant.weight,
            ask=ask,
            decision=decision,
            lane=lane,
        )

    async def arrive(self, entry: QueueEntry) -> RouteDecision | None:
        """Workers with capacity, reserved. None: the request has a seat, and its `decision` gets the result later.

        Raises:
            ApiError: 429 when its tenant's other requests fill the queue; 503 when it is full.
        """
        self._note_demand(entry.prompt_tokens)
        self._precedence.see(entry.tenant)
        entry.is_behind = self._precedence.is_behind(entry, self.queue)
        decision = None
        if self._precedence.starts_at_once(entry, self.queue) and not self._yields(entry):
            self._precedence.begin_at_once(entry.tenant)
            try:
                decision = await self._try(entry, None)
            finally:
                self._precedence.end_at_once(entry.tenant)
        if decision is None:
            self._seat(entry)
            return None
        if not self.queue.holds(entry.tenant):
            self.counters.counters.pass_by(entry.tenant)
        self._note_admitted(entry, decision)
        return decision

    def note_rejected(self, prompt_tokens: int) -> None:
        """A request was rejected before it arrived here: it is demand all the same."""
        self._note_demand(prompt_tokens)

    def is_next(self, entry: QueueEntry) -> bool:
        """Whether the next turn tries this request: it is worth one now."""
        return entry in (self._next(self._blocked), self.queue.next(self.clock.now()))

    def has_overtaken(self, entry: QueueEntry) -> bool:
        """Whether this new request goes before others, or past them. One that is alone has been tried when it
        arrived."""
        return len(self.queue) > 1 and self.is_next(entry)

    async def turn(self) -> bool:
        """Admit the head of line and reject late requests. True after an admission: the next one may be tried at once.

        Otherwise there is a next turn when something has changed, and after `policy.poll_s` at the latest: other
        gateways' requests end as well.
        """
        self._note_workers()
        try:
            admitted = await self._round()
        except Exception:
            # A task boundary: queued requests must not wait forever.
            logger.exception("queue iteration failed")
            admitted = False
        self._give_up_on_late()
        return admitted

    def freed(self, worker: str = "", cell: OtherCell | None = None) -> None:
        """A request has ended, or left its worker, whose incarnation is `worker` if it is known, in the own cell or in
        `cell`."""
        if not self._precedence.takes_freed_place() and self.queue:
            self._turnover.add(1, worker=worker, cell=_name_of(cell))

    async def run(self) -> None:
        """Report to other gateways until canceled."""
        # Unreported, gateways would drift apart for good.
        failure = "cannot report virtual token counters"
        await run_periodically(self.sync, every_s=SYNC_S, logger=logger, failure=failure)

    async def sync(self) -> None:
        """Exchange charges and queue heads with other gateways. Called every `SYNC_S`."""
        self._timeouts.note_lack()
        if self._timeouts.lacking_since is not None:
            self._note_workers()  # turns end with the last request that waits
        head = self.queue.next(self.clock.now())
        left, wanted = 0, self._lacking()
        if head is not None and self._yields(head):
            left, wanted = self._turnover.leave(), 0
        standing = await self.counters.sync(head=self._queue_head(head), left=left, wanted=wanted)
        if standing is not None:
            self._way.update(standing)
        self._turnover.add(min(left if standing is None else standing.places, self._lacking()))

    def leave(self, entry: QueueEntry) -> None:
        """It waits no more. Does nothing when it has no seat."""
        self._of_adapters.discard(entry)
        if self.queue.remove(entry):
            self.observer.waiting(self.queue.lengths)
            if not self.queue:
                self._turnover.leave()

    def give_back(self, decision: RouteDecision) -> None:
        """Of a client that has left."""
        self._background.start(self.chooser.release(decision))

    def charge_output(self, tenant: Tenant, tokens: int) -> None:
        """A running request has brought so many tokens."""
        self.counters.charge(tenant.name, OUTPUT_WEIGHT * tokens / tenant.weight)

    def correct_prompt(self, tenant: Tenant, prompt_tokens: int, *, predicted: int, cached: int) -> None:
        """Of a prompt `cached` tokens were in a prefix cache in fact; `predicted` were charged as such."""
        error = prompt_cost(prompt_tokens, cached) - prompt_cost(prompt_tokens, predicted)
        if error:
            self.counters.charge(tenant.name, error / tenant.weight)

    async def settle(self) -> None:
        """Wait for what is being given back. Call at shutdown."""
        await self._background.settle()

    def _seat(self, entry: QueueEntry) -> None:
        """Raises `ApiError` when there is no seat for it."""
        if not self.queue:
            self._pace.restart()
        others = any(tenant != entry.tenant for tenant in self.queue.lengths)
        loser = self.queue.add(entry)
        if loser is entry:
            raise self._refusal("pushed_out" if others else "full")
        if entry.lane is not None and entry.lane.adapter:
            self._of_adapters.add(entry)
        if loser is not None:
            self._fail(loser, "pushed_out")
        self.observer.waiting(self.queue.lengths)

    async def _round(self) -> bool:
        """Try the head of line, and those that may pass it. True after an admission."""
        workers, now = self.chooser.workers(), self.clock.now()
        blocked = self._blocked = BlockedLanes(workers=workers)
        for waiting in self._of_adapters if self._timeouts.lacking_since is None else ():
            # Requests behind a blocked one are not tried, so that they would keep an old verdict.
            if waiting.lane is not None and not blocked.serve(waiting.lane):
                waiting.verdict = Verdict.NO_WORKER
            elif waiting.not_before <= now:  # else it was tried a moment ago
                waiting.verdict = Verdict.NO_ROOM
        if not workers:
            return False
        skipped = passed = 0
        while skipped < TRIES_PER_ROUND and passed < MAX_PASSED:
            entry = self._next(blocked)
            if entry is None or self._yields(entry):
                return False
            try:
                decision = await self._try(entry, blocked)
            except Exception as error:  # noqa: BLE001  # raised where it is awaited; others continue
                self._end(entry, error)
                skipped += 1
                continue
            if decision is not None:
                self._hand_over(entry, decision)
                return True
            if entry.verdict is Verdict.NO_ROOM:
                passed += 1
            else:
                entry.not_before = self.clock.now() + PASSED_OVER_S
                skipped += 1
        return False

    def _next(self, blocked: BlockedLanes) -> QueueEntry | None:
        """The next one to try that does not wait behind a blocked one."""
        if blocked and not self._of_adapters:
            return None  # all want the same workers; a thousand need no look
        return self.queue.next(self.clock.now(), held=lambda waiting: blocked.hold(waiting.lane))

    def _yields(self, entry: QueueEntry) -> bool:
        """Whether `entry`, the head of line here, leaves its slot to others for now."""
        return self._way.yields(entry, entry.cost)

    def _queue_head(self, head: QueueEntry | None) -> QueueHead | None:
        """The request that the next free slot is for. A slot does not help a request that no worker can serve."""
        takes_a_place = head is not None and head.verdict is Verdict.NO_ROOM
        return queue_head(head, self.clock.now()) if takes_a_place else None

    def _lacking(self) -> int:
        """Slots that could be used here in addition to the free ones: none for requests that no worker can serve."""
        able = sum(entry.verdict is not Verdict.NO_WORKER for entry in self.queue)
        return max(0, able - len(self._turnover))

    async def _try(self, entry: QueueEntry, blocked: BlockedLanes | None) -> RouteDecision | None:
        """Workers with room, reserved; None after noting why there are none. `blocked`: of a turn of the queue."""
        if blocked is not None and blocked:
            return await self._pass(entry, blocked)
        try:
            decision = await entry.ask()
        except NoWorkersError:
            entry.verdict = Verdict.NO_WORKER
            return None
        if self._takes_place(entry, decision) or self._has_room(decision, entry) or self._goes_early(decision, entry):
            return decision
        await self.chooser.release(decision)
        entry.verdict = Verdict.NO_ROOM
        if blocked is not None:
            blocked.block(entry.lane, decision)
        return None

    async def _pass(self, entry: QueueEntry, blocked: BlockedLanes) -> RouteDecision | None:
        """The same without the workers that those before it wait for."""
        assert entry.lane is not None, "a request without a lane is held"
        entry.verdict = Verdict.NO_ROOM
        try:
            decision = await entry.lane.ask_apart(blocked.avoided)
        except NoWorkersError:
            blocked.block(entry.lane, None)
            return None
        if self._has_room(decision, entry):
            return decision
        await self.chooser.release(decision)
        blocked.block(entry.lane, decision)
        return None

    def _takes_place(self, entry: QueueEntry, decision: RouteDecision) -> bool:
        """Whether it takes a place that no report contains yet: of the cell of `decision`, and of an adapter, one at a
        worker that has it."""
        lane, cell = entry.lane, _name_of(decision.cell)
        if lane is None or not lane.adapter or not self._turnover:
            return self._turnover.take(cell=cell)
        workers = self.chooser.workers()
        if all(map(lane.serves, workers)):
            return self._turnover.take(cell=cell)
        serving = {worker.incarnation for worker in workers if lane.serves(worker)}
        return self._turnover.take(serving.__contains__, cell=cell)

    def _has_room(self, decision: RouteDecision, entry: QueueEntry) -> bool:
        return not has_to_wait(decision.terms) and self._waits_little(decision, entry)

    def _waits_little(self, decision: RouteDecision, entry: QueueEntry) -> bool:
        longest = self._precedence.longest_wait_s(entry, self.policy.worker_wait_s)
        return prefill_wait_s(decision.terms) <= longest

    def _goes_early(self, decision: RouteDecision, entry: QueueEntry) -> bool:
        return self._waits_little(decision, entry) and self._precedence.goes_early(entry)

    def _hand_over(self, entry: QueueEntry, decision: RouteDecision) -> None:
        self.leave(entry)
        if entry.decision.done():
            # Its client disconnected during the query.
            self.give_back(decision)
            return
        self._note_admitted(entry, decision)
        self._pace.admitted()
        entry.decision.set_result(decision)

    def _note_demand(self, prompt_tokens: int) -> None:
        now = self.clock.now()
        gap_s = 0.0 if self._asked_at is None else max(0.0, now - self._asked_at)
        self._asked_at = now
        self.observer.note_demand(prompt_tokens, gap_s=gap_s)

    def _note_admitted(self, entry: QueueEntry, decision: RouteDecision) -> None:
        cost = prompt_cost(entry.prompt_tokens, decision.matched_tokens) / entry.weight
        self.counters.charge(entry.tenant, cost)
        self._timeouts.note_choice(decision)
        waited_s = self.clock.now() - entry.arrived
        if entry.awaits_start:
            self.observer.start_awaited(waited_s, served=True)
        self.observer.admitted(waited_s, prompt_tokens=entry.prompt_tokens, matched_tokens=decision.matched_tokens)

    def _lacks_workers(self) -> bool:
        """Whether no request can be served, as far as is known here."""
        return not self.chooser.workers() or self._timeouts.lacks_a_role()

    def _note_workers(self) -> None:
        """Requests that are not tried would keep the verdict of before."""
        lacking = self._lacks_workers()
        if self._timeouts.note(lacking=lacking) or lacking:
            for waiting in self.queue:
                waiting.verdict = Verdict.NO_WORKER if lacking else Verdict.NO_ROOM
                if not lacking:
                    waiting.not_before = float("-inf")  # it was passed over for want of the worker that has come

    def _give_up_on_late(self) -> None:
        now, starting = self.clock.now(), self._timeouts.awaits_start()
        if now < self._late_from and self._timeouts.lacking_since is None:
            return
        self._late_from = now + self.policy.poll_s
        for entry in [*self.queue]:
            lacks_worker = entry.verdict is Verdict.NO_WORKER
            entry.awaits_start |= starting and lacks_worker
            until = self._timeouts.until_worker if lacks_worker else self._timeouts.until_capacity
            if now >= until(entry.arrived):
                self._fail(entry, entry.verdict.value)

    def _fail(self, entry: QueueEntry, reason: str) -> None:
        if entry.awaits_start:
            self.observer.start_awaited(self.clock.now() - entry.arrived, served=False)
        self._end(entry, self._refusal(reason))

    def _end(self, entry: QueueEntry, error: Exception) -> None:
        self.leave(entry)
        if not entry.decision.done():
            entry.decision.set_exception(error)

    def _refusal(self, reason: str) -> ApiError:
        self.observer.refused(reason)
        wait_s = self._pace.wait_s(len(self.queue))
        return refusal(reason, no_workers=self._lacks_workers(), wait_s=wait_s, start_s=self._timeouts.retry_s())


def _name_of(cell: OtherCell | None) -> str:
    return "" if cell is None else cell.name
