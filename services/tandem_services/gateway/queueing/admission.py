"""Late binding: a new request waits here, not at a worker, while no worker has room for it.

    1. asked      nobody waits: the router is asked at once. A worker with room takes the request
    2. queued     else it takes one of a bounded number of seats (`FairQueue`)
    3. tried      whose turn it is asks the router whenever something may have changed: a request has ended, or a moment
                  has passed. One that no worker can take at all is passed over for a while; one that only has to wait
                  for room is not, or long prompts would wait for ever
    4. admitted   with a worker; what it costs is charged to its tenant
       refused    pushed out by a tenant that holds fewer seats, or after `room_s` without room, or after `worker_s`
                  without any worker: 429 or 503 with Retry-After

A worker has room when the sequence need not wait for others to end and the prompt need not wait longer than
`worker_wait_s` for prompts before it: enough for it to be busy until the next one arrives, too little for a queue.

What workers report is up to a second old. When a request of this gateway ends, its place is free at once, whatever the
last report says: as many requests may go to full workers as have ended since somebody waits (`_turnover`).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from tandem_engine.clock import Clock
from tandem_services.common.errors import ApiError, unavailable
from tandem_services.common.tasks import BackgroundTasks
from tandem_services.gateway.access.tenants import Tenant
from tandem_services.gateway.queueing.fair_queue import FairQueue, Waiting
from tandem_services.gateway.queueing.queue_metrics import QueueFigures, QueueMetrics
from tandem_services.gateway.queueing.shared_counters import SharedCounters
from tandem_services.router.choice import Choice, NoWorkersError, WorkerView
from tandem_services.router.scoring import has_to_wait, prefill_wait_s
from tandem_services.router.virtual_counters import OUTPUT_WEIGHT, prompt_cost

logger = logging.getLogger(__name__)

TRIES_PER_ROUND = 4
"""Requests that nobody can take which are passed over before the next moment."""
PASSED_OVER_S = 0.5
MOST_RETRY_S = 30.0
NO_WORKER_RETRY_S = 2.0
"""A worker that just vanished is back, or replaced by another, after about this long at best."""
PACE_SAMPLES = 32
"""Admissions from the queue that its pace is measured by."""

Ask = Callable[[], Awaitable[Choice]]
"""Asks the router, and reserves what it names. Raises `NoWorkersError`."""


class Chooser(Protocol):
    """What the queue needs of the router; see `Router`."""

    async def release(self, choice: Choice) -> None: ...

    def workers(self) -> tuple[WorkerView, ...]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionPolicy:
    """How long a new request waits, and for what."""

    room_s: float = 60.0
    """For room while there are workers."""
    worker_s: float = 10.0
    """For a worker while none can take it."""
    worker_wait_s: float = 1.0
    """Predicted wait behind other prompts at a worker that still counts as room."""
    poll_s: float = 0.1


class Verdict(Enum):
    """Why a request was not admitted."""

    NO_ROOM = "no_room"
    NO_WORKER = "no_worker"


@dataclass(kw_only=True, slots=True, eq=False)
class Visitor(Waiting):
    """One request in the queue, and who waits for its end."""

    prompt_tokens: int
    ask: Ask
    choice: "asyncio.Future[Choice]"
    verdict: Verdict = Verdict.NO_ROOM
    """Of its last try."""


@dataclass(kw_only=True, slots=True)
class Admission:
    """One per model service; belongs to its event loop."""

    chooser: Chooser
    clock: Clock
    queue: FairQueue[Visitor]
    counters: SharedCounters
    metrics: QueueMetrics
    policy: AdmissionPolicy
    _turnover: int = 0
    _nobody_since: float | None = None
    _pump: "asyncio.Task[None] | None" = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _admitted_at: deque[float] = field(default_factory=lambda: deque(maxlen=PACE_SAMPLES))
    _background: BackgroundTasks = field(default_factory=BackgroundTasks)

    def __post_init__(self) -> None:
        self.metrics.watch(self.figures)

    def figures(self) -> QueueFigures:
        """The queue as it is."""
        now = self.clock.now()
        waiting = [*self.queue]
        return QueueFigures(
            prompt_tokens=sum(visitor.prompt_tokens for visitor in waiting),
            oldest_wait_s=max((now - visitor.arrived for visitor in waiting), default=0.0),
            held=sum(visitor.verdict is Verdict.NO_WORKER for visitor in waiting),
        )

    async def admit(self, ask: Ask, *, tenant: Tenant, priority: int, prompt_tokens: int) -> Choice:
        """Workers with room for a new request, reserved for it; may take a while.

        Raises:
            ApiError: 429 when its tenant's other requests fill the queue; 503 when it is full, or nobody takes it in
                time.
        """
        visitor = Visitor(
            tenant=tenant.name,
            weight=tenant.weight,
            priority=priority,
            arrived=self.clock.now(),
            prompt_tokens=prompt_tokens,
            ask=ask,
            choice=asyncio.get_running_loop().create_future(),
        )
        self.metrics.asked(prompt_tokens)
        if self.queue:
            return await self._wait(visitor)
        choice = await self._try(visitor)
        if choice is None:
            return await self._wait(visitor)
        if tenant.name not in self.queue.lengths:
            self.counters.counters.arrive(tenant.name)
            self.counters.counters.leave(tenant.name)
        self._note_admitted(visitor, choice)
        return choice

    def charge_output(self, tenant: Tenant, tokens: int) -> None:
        """A running request has brought so many tokens."""
        self.counters.charge(tenant.name, OUTPUT_WEIGHT * tokens / tenant.weight)

    def correct_prompt(self, tenant: Tenant, prompt_tokens: int, *, predicted: int, cached: int) -> None:
        """Of a prompt `cached` tokens were in a prefix cache in fact; `predicted` were charged as such."""
        error = prompt_cost(prompt_tokens, cached) - prompt_cost(prompt_tokens, predicted)
        if error:
            self.counters.charge(tenant.name, error / tenant.weight)

    def freed(self) -> None:
        """A request has ended, or left its worker."""
        if self.queue:
            self._turnover += 1
            self._changed.set()

    async def close(self) -> None:
        """At shutdown: nobody waits any more."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        await self._background.settle()

    async def _wait(self, visitor: Visitor) -> Choice:
        self._seat(visitor)
        try:
            return await visitor.choice
        except asyncio.CancelledError:
            # It may have been admitted in the very moment in which its client left.
            if not visitor.choice.cancelled() and visitor.choice.exception() is None:
                self._background.start(self.chooser.release(visitor.choice.result()))
            raise
        finally:
            self._unseat(visitor)

    def _seat(self, visitor: Visitor) -> None:
        """Raises `ApiError` when there is no seat for it."""
        others = any(tenant != visitor.tenant for tenant in self.queue.lengths)
        loser = self.queue.add(visitor)
        if loser is visitor:
            raise self._refusal("pushed_out" if others else "full")
        if loser is not None:
            self._fail(loser, "pushed_out")
        self.metrics.waiting(self.queue.lengths)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run(), name="admission")

    def _unseat(self, visitor: Visitor) -> None:
        if self.queue.remove(visitor):
            self.metrics.waiting(self.queue.lengths)

    async def _run(self) -> None:
        """As long as somebody waits."""
        while self.queue:
            try:
                admitted = await self._round()
            except Exception:
                # A task boundary: those who wait must not wait for ever.
                logger.exception("a turn of the queue failed")
                admitted = False
            self._give_up_on_late()
            if not admitted:
                await self._pause()
        self._turnover = 0

    async def _round(self) -> bool:
        """Try who is next. True when somebody was admitted: the next one may be tried at once."""
        if not self.chooser.workers():
            for waiting in self.queue:
                waiting.verdict = Verdict.NO_WORKER
            return False
        for _ in range(TRIES_PER_ROUND):
            visitor = self.queue.next(self.clock.now())
            if visitor is None:
                return False
            try:
                choice = await self._try(visitor)
            except Exception as error:  # noqa: BLE001  # its own surprise, raised where it is waited for; others go on
                self._end(visitor, error)
                continue
            if choice is not None:
                self._hand_over(visitor, choice)
                return True
            if visitor.verdict is Verdict.NO_ROOM:
                return False
            visitor.not_before = self.clock.now() + PASSED_OVER_S
        return False

    async def _try(self, visitor: Visitor) -> Choice | None:
        """Workers with room, reserved; None after noting why there are none."""
        try:
            choice = await visitor.ask()
        except NoWorkersError:
            visitor.verdict = Verdict.NO_WORKER
            return None
        if self._has_room(choice) or self._turnover > 0:
            self._turnover = max(0, self._turnover - 1)
            return choice
        await self.chooser.release(choice)
        visitor.verdict = Verdict.NO_ROOM
        return None

    def _has_room(self, choice: Choice) -> bool:
        return not has_to_wait(choice.terms) and prefill_wait_s(choice.terms) <= self.policy.worker_wait_s

    def _hand_over(self, visitor: Visitor, choice: Choice) -> None:
        self._unseat(visitor)
        if visitor.choice.done():
            # Its client left while the router was asked.
            self._background.start(self.chooser.release(choice))
            return
        self._note_admitted(visitor, choice)
        self._admitted_at.append(self.clock.now())
        visitor.choice.set_result(choice)

    def _note_admitted(self, visitor: Visitor, choice: Choice) -> None:
        cost = prompt_cost(visitor.prompt_tokens, choice.matched_tokens) / visitor.weight
        self.counters.charge(visitor.tenant, cost)
        self.metrics.admitted(self.clock.now() - visitor.arrived, matched_tokens=choice.matched_tokens)

    async def _pause(self) -> None:
        """Until something has changed, or a moment has passed: other gateways' requests end as well."""
        try:
            async with asyncio.timeout(self.policy.poll_s):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()

    def _give_up_on_late(self) -> None:
        now = self.clock.now()
        nobody = not self.chooser.workers()
        self._nobody_since = (self._nobody_since or now) if nobody else None
        for visitor in [*self.queue]:
            since, patience_s = visitor.arrived, self.policy.room_s
            if visitor.verdict is Verdict.NO_WORKER:
                # Who waited for room before the last worker left has the whole time for a new one.
                since, patience_s = max(since, self._nobody_since or since), self.policy.worker_s
            if now - since >= patience_s:
                self._fail(visitor, visitor.verdict.value)

    def _fail(self, visitor: Visitor, reason: str) -> None:
        self._end(visitor, self._refusal(reason))

    def _end(self, visitor: Visitor, error: Exception) -> None:
        self._unseat(visitor)
        if not visitor.choice.done():
            visitor.choice.set_exception(error)

    def _refusal(self, reason: str) -> ApiError:
        self.metrics.refused(reason)
        if reason == Verdict.NO_WORKER.value or not self.chooser.workers():
            return unavailable("No worker can take the request now. Try again later.", retry_after=NO_WORKER_RETRY_S)
        retry_after = self._predicted_wait_s()
        if reason == "pushed_out":
            return ApiError(
                429,
                "Your requests fill the queue. Try again later, or send fewer at once.",
                kind="RateLimitError",
                reason="queue_full",
                retry_after=retry_after,
            )
        return unavailable("All workers are at their limit. Try again later.", retry_after=retry_after)

    def _predicted_wait_s(self) -> float:
        """Until the queue is empty at its present pace."""
        if len(self._admitted_at) < 2:
            return 1.0
        elapsed = max(self.clock.now() - self._admitted_at[0], 1e-3)
        return min(max(len(self.queue) * elapsed / len(self._admitted_at), 1.0), MOST_RETRY_S)
