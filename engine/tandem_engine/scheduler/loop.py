"""One iteration of the scheduler loop, in normal and in overlap mode.

    normal    plan ─ launch ─ wait ─ settle                      the device idles while the host works
    overlap   plan N+1 ─ launch N+1 ─ wait for N ─ settle N      N+1 computes while N is settled and N+2 planned

At most one step is in flight while another is planned. In overlap mode the host plans N+1 without the tokens of N:
the input id of a decode is `RESOLVE`, and a request that ends in N computes one surplus token in N+1, which settlement
drops. A step that raises is void, and so is the one launched on top of it; `Isolation` handles both.

A plan that needs the tokens of N (to retract, or to draft) returns `SETTLE_FIRST` [finish-before-retract]
[settle-before-retract]: this iteration then settles before it launches, as in normal mode. The same holds after a step
that verified drafts, because the lengths of its sequences are unknown until it is settled.

With `TAKE_IN_FIRST` it launches nothing at all, and the next iteration plans with the requests that came during the
step: several tenants have prompts, and one that comes now must not wait for two steps of the others.

A step with a grammar cannot sample before its masks are filled, which takes the tokens of the step before. It is
launched anyway, and its masks follow right after settlement [masks-after-settling], or at once where no step was in
flight. They are released even if settlement or filling them fails, because the forward waits for them. In normal mode
they are filled first.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tandem_engine.base.clock import Clock
from tandem_engine.executor.interface import ModelExecutor
from tandem_engine.forward.batch import ForwardBatch, ForwardResult, TokenMasks
from tandem_engine.forward.kv_progress import KvProgress
from tandem_engine.scheduler.counters import Phase, Tally
from tandem_engine.scheduler.finishing import Steps
from tandem_engine.scheduler.gates.grammar import fill_masks
from tandem_engine.scheduler.planner import Hold, Planner, StepPlan
from tandem_engine.scheduler.request import sends_kv
from tandem_engine.scheduler.schedule_batch import BatchBuilder, ScheduleBatch
from tandem_engine.scheduler.speculation import NO_DRAFTS, Speculation
from tandem_engine.scheduler.stage import QueueStage
from tandem_engine.scheduler.step_completion import Settlement

logger = logging.getLogger(__name__)

WAIT_SLICE = 0.25
"""Seconds that the loop waits for a step before it lets its owner answer others."""

FIRST_LOOK = 1e-3
"""Seconds into that wait after which it looks at handoffs that are nearly over, and then after twice as long each time:
a look takes the interpreter from the step for a moment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlight:
    """A launched step."""

    batch: ScheduleBatch
    view: ForwardBatch
    """Kept until the step has settled, so that this thread frees its tensors. torch releases the interpreter lock to
    free one, and the forward thread is to keep it between a step and the next: a thread that gets it then, which is the
    scheduler with results to settle, would keep the next step waiting."""
    future: Future[ForwardResult]
    masks: TokenMasks | None


@dataclass(kw_only=True, slots=True)
class Loop:
    """Drives planner, executor and settlement."""

    overlap: bool
    planner: Planner
    builder: BatchBuilder
    executor: ModelExecutor
    settlement: Settlement
    steps: Steps
    clock: Clock
    tally: Tally
    stages: Sequence[QueueStage]
    """Notified of launched steps whose KV goes to another worker."""
    longest_step: float
    """Seconds after which a step that has not come back is taken for hung."""
    speculation: Speculation | None = None
    in_flight: InFlight | None = None
    while_waiting: Callable[[], None] = lambda: None
    """Called between slices of a long wait. It must not touch the scheduler."""
    on_hang: Callable[[float], None] = lambda seconds: None  # noqa: ARG005
    """Called once for a step that hangs, with how long. It may look at the scheduler and change nothing."""

    def turn(self) -> None:
        """Plan, launch and settle once."""
        if self.speculation is not None:
            self.speculation.begin_turn()
        if self.overlap:
            self.in_flight = self._overlapped(self.in_flight)
        else:
            self._normal()

    def stand_still(self) -> None:
        """An iteration that launches nothing: settle what is in flight, and apply pending finishes."""
        last, self.in_flight = self.in_flight, None
        if last is not None:
            self._settle(last, None)
        self.interrupt()
        self.planner.sweep()

    def interrupt(self) -> None:
        """The next turn does not follow this one at once."""
        if self.speculation is not None:
            self.speculation.timer.interrupt()
        if self.planner.delay is not None:
            self.planner.delay.interrupt()

    def _normal(self) -> None:
        current = self._launch(self._plan(None), None)
        if current is not None:
            self._settle(current, None)

    def _overlapped(self, last: InFlight | None) -> InFlight | None:
        if last is not None and last.batch.drafts.chains:
            self._settle(last, None)
            last = None
        plan = self._plan(last)
        if plan is Hold.TAKE_IN_FIRST and last is not None:
            self._settle(last, None)
            return None
        if plan is Hold.SETTLE_FIRST and last is not None:
            self._settle(last, None)
            last = None
            plan = self._plan(None)
        current = self._launch(plan, last)
        return current if self._settle_beside(last, current) else None

    def _settle_beside(self, last: InFlight | None, current: InFlight | None) -> bool:
        """Settle `last`, then fill the masks that the forward of `current` waits for. False as `_settle` returns it."""
        masks = None if current is None else current.masks
        if current is None or masks is None:
            return last is None or self._settle(last, current)
        try:
            settled = last is None or self._settle(last, current)
            if settled:
                with self._scheduling(Phase.SETTLE, beside=current):
                    fill_masks(masks, current.batch.sampler_runs)
        finally:
            masks.release()
        return settled

    def _plan(self, last: InFlight | None) -> StepPlan | Hold:
        with self._scheduling(Phase.PLAN, beside=last):
            return self.planner.plan(in_flight=last is not None)

    def _launch(self, plan: StepPlan | Hold, last: InFlight | None) -> InFlight | None:
        if not isinstance(plan, StepPlan):
            return None
        drafts = NO_DRAFTS
        if self.speculation is not None and last is None and plan.decodes:
            drafts = self.speculation.draft(plan.decodes)
        with self._scheduling(Phase.LAUNCH, beside=last):
            batch = ScheduleBatch(step=self.steps.launch(), extends=plan.extends, decodes=plan.decodes, drafts=drafts)
            progress = self._announce(batch)
            view = self.builder.build(batch, progress)
            batch.mark_launched()
            self.tally.launched += 1
            masks = view.sampling.masks
            if masks is not None and not self.overlap:
                fill_masks(masks, batch.sampler_runs)
        # Outside the measured time: in normal mode this is the forward itself.
        future = self.executor.launch(view)
        if progress is not None:
            future.add_done_callback(progress.ended)
        return InFlight(batch=batch, view=view, future=future, masks=masks)

    def _announce(self, batch: ScheduleBatch) -> KvProgress | None:
        """Notify stages of the prompts in `batch` that are sent elsewhere. None: there are none."""
        sent = [extend for extend in batch.extends if sends_kv(extend.req)]
        if not sent:
            return None
        progress = KvProgress(self.clock)
        for stage in self.stages:
            for extend in sent:
                stage.chunk_launched(extend.req, extend.stop, progress)
        return progress

    def _settle(self, done: InFlight, current: InFlight | None) -> bool:
        """False when `done` raised: then `current` was waited for, and is void with it."""
        error = self._wait(done.future)
        if error is not None:
            self._fail(done, error, current)
            return False
        with self._scheduling(Phase.SETTLE, beside=current):
            self.settlement.settle(done.batch, done.future.result())
        return True

    def _fail(self, done: InFlight, error: BaseException, current: InFlight | None) -> None:
        if current is not None and current.masks is not None:
            # What it samples is void, and it would wait for masks that are never filled.
            current.masks.release()
        if current is not None and (also := self._wait(current.future)) is not None:
            logger.info("step %d, on top of one that failed, raised too: %r", current.batch.step, also)
        with self._scheduling(Phase.SETTLE, beside=None):
            self.settlement.fail(done.batch, error, above=None if current is None else current.batch)

    def _wait(self, future: Future[ForwardResult]) -> BaseException | None:
        """Wait for a step; returns what it raised.

        A step can take seconds: a long chunk of a large model on a CPU. That is no silence, so the owner of
        the loop answers its peers in the meantime, and every slice of the wait counts as a turn. After
        `longest_step` a step counts as hung: that is reported, and peers get no more keepalives of this engine.
        """
        began = self.clock.now()
        hangs = False
        while True:
            try:
                error = self._wait_a_slice(future)
            except TimeoutError:
                waited = self.clock.now() - began
                if waited < self.longest_step:
                    self.tally.loops += 1
                    self.while_waiting()
                elif not hangs:
                    hangs = True
                    self.on_hang(waited)
            else:
                self.tally.spend(Phase.WAIT, self.clock.now() - began)
                return error

    def _wait_a_slice(self, future: Future[ForwardResult]) -> BaseException | None:
        """Raises `TimeoutError` when the step continues. Handoffs do not wait for it: they were computed before."""
        left, pause = WAIT_SLICE, FIRST_LOOK
        while pause < left and self._more_is_to_come():
            with suppress(TimeoutError):
                return future.exception(timeout=pause)
            left, pause = left - pause, 2 * pause
        return future.exception(timeout=left)

    def _more_is_to_come(self) -> bool:
        """Let every stage get on during a step; whether one has more to do soon."""
        asked = [stage.run_during_forward() for stage in self.stages]
        return any(asked)

    @contextmanager
    def _scheduling(self, phase: Phase, *, beside: InFlight | None) -> Iterator[None]:
        """Time spent here counts as hidden when the concurrent step (`beside`) is still computing at the end."""
        start = self.clock.now()
        yield
        spent = self.clock.now() - start
        self.tally.schedule_s += spent
        self.tally.spend(phase, spent)
        if beside is not None and not beside.future.done():
            self.tally.overlap_hidden_s += spent
