"""One turn of the loop, in two ways.

    normal    plan ─ launch ─ wait ─ settle                      device idles while the host works
    overlap   plan N+1 ─ launch N+1 ─ wait for N ─ settle N      N+1 computes while N is settled and N+2 planned

Depth is one: at most one step is in flight while another is planned. In overlap mode the host plans
N+1 without knowing the tokens of N: a decode's input id is `RESOLVE`, and a request that ends in N
computes one token too many in N+1, which settlement drops.

What the plan may not do without the tokens of N (retract, T15, T16) it answers with `SETTLE_FIRST`;
then this turn settles before it launches, as normal mode does.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from tandem_engine.clock import Clock
from tandem_engine.executor.interface import ModelExecutor
from tandem_engine.forward.forward_batch import ForwardResult
from tandem_engine.scheduler.planner import Hold, Planner, StepPlan
from tandem_engine.scheduler.schedule_batch import BatchBuilder, ScheduleBatch
from tandem_engine.scheduler.settle import Settlement
from tandem_engine.scheduler.steps import Steps
from tandem_engine.scheduler.tally import Tally


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlight:
    """A launched step."""

    batch: ScheduleBatch
    future: Future[ForwardResult]


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
    in_flight: InFlight | None = None

    def turn(self) -> None:
        """Plan, launch and settle once."""
        if self.overlap:
            self.in_flight = self._overlapped(self.in_flight)
        else:
            self._normal()

    def _normal(self) -> None:
        current = self._launch(self._plan(None), None)
        if current is not None:
            self._settle(current, None)

    def _overlapped(self, last: InFlight | None) -> InFlight | None:
        plan = self._plan(last)
        if plan is Hold.SETTLE_FIRST and last is not None:
            self._settle(last, None)
            last = None
            plan = self._plan(None)
        current = self._launch(plan, last)
        if last is not None:
            self._settle(last, current)
        return current

    def _plan(self, last: InFlight | None) -> StepPlan | Hold:
        with self._scheduling(beside=last):
            return self.planner.plan(in_flight=last is not None)

    def _launch(self, plan: StepPlan | Hold, last: InFlight | None) -> InFlight | None:
        if not isinstance(plan, StepPlan):
            return None
        with self._scheduling(beside=last):
            batch = ScheduleBatch(step=self.steps.launch(), extends=plan.extends, decodes=plan.decodes)
            view = self.builder.build(batch)
            batch.mark_launched()
            self.tally.launched += 1
        # Outside the measured time: in normal mode this is the forward itself.
        return InFlight(batch=batch, future=self.executor.launch(view))

    def _settle(self, done: InFlight, current: InFlight | None) -> None:
        error = done.future.exception()  # waits for the step
        with self._scheduling(beside=current):
            if error is None:
                self.settlement.settle(done.batch, done.future.result())
            else:
                self.settlement.fail(done.batch, error)

    @contextmanager
    def _scheduling(self, *, beside: InFlight | None) -> Iterator[None]:
        """Time spent here counts as hidden when the step `beside` it is still computing at the end."""
        start = self.clock.now()
        yield
        spent = self.clock.now() - start
        self.tally.schedule_s += spent
        if beside is not None and not beside.future.done():
            self.tally.overlap_hidden_s += spent
