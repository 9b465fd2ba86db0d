"""When new prompts are admitted while others decode: `--scheduler-delay-factor`, as in vLLM's scheduler.

A prompt that arrives alone takes a step of its own, and requests that decode wait for that step. With a factor above
0 new prompts wait until the oldest of them has waited factor × the time of the last step with prompts, so that several
are computed together. No prompt waits while there is nothing else to compute.

Times are those of the scheduler's clock when steps are planned, which is the same on every rank.
"""

from dataclasses import dataclass, field

from tandem_engine.clock import Clock
from tandem_engine.scheduler.queues import Queues


@dataclass(kw_only=True, slots=True)
class PromptDelay:
    """Belongs to one planner."""

    clock: Clock
    factor: float
    lag: int
    """Plans between that of a step and the first one after its beginning: 1 with overlap, else 0."""
    last_step_s: float = 0.0
    """Of the last step with prompts."""
    _planned_at: float | None = None
    _prompts: list[bool] = field(default_factory=list)
    """Whether the last steps computed prompts, the newest last: as many as may not have been measured."""

    def begin_plan(self) -> None:
        """A step is about to be planned: note how long the one that has ended since the last plan took."""
        now = self.clock.now()
        if self._planned_at is not None and len(self._prompts) > self.lag and self._prompts[-1 - self.lag]:
            self.last_step_s = now - self._planned_at
        self._planned_at = now

    def planned(self, *, prompts: bool) -> None:
        """The step computes prompts, or not."""
        self._prompts = [*self._prompts[-self.lag :], prompts] if self.lag else [prompts]

    def interrupt(self) -> None:
        """The next plan does not follow at once: the time until then is that of no step."""
        self._planned_at = None
        self._prompts.clear()

    def holds(self, queues: Queues) -> bool:
        """Whether those that wait stay in the queue, in a step that has others to compute."""
        if not len(queues.waiting):
            return False
        # A request that was admitted before and put back has waited already.
        if any(req.first_scheduled_at is not None for req in queues.waiting):
            return False
        oldest = min(req.arrived_at for req in queues.waiting)
        return self.clock.now() - oldest <= self.factor * self.last_step_s

    def note(self, queues: Queues, *, held: bool) -> None:
        """The step leaves those that wait in the queue for the delay's sake, or not: their time of it is kept."""
        now = self.clock.now()
        for req in queues.waiting:
            if req.delayed_since is not None:
                req.delayed_s += now - req.delayed_since
            req.delayed_since = now if held else None
