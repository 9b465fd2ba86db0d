"""Workers that have sent a request away, because they drain or are paused, and what the last view did not know of it.

Redis knows within milliseconds, for such a worker tells it at once. A gateway's own view is a heartbeat old, and while
it decides, every request until the next heartbeat would find out for itself.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from tandem_engine.clock import Clock
from tandem_services.router.registry import WorkerState

TOLD_S = 0.25
"""A view that was asked for sooner after a refusal may be from before the worker told Redis."""

ASK_AGAIN_S = 2.0
"""While Redis is away there is no view, and only the worker can say that it takes requests again: then it is asked."""


class _Refusal(NamedTuple):
    state: WorkerState
    at: float


@dataclass(slots=True)
class Refusals:
    """One router's."""

    clock: Clock
    _latest: dict[str, _Refusal] = field(default_factory=dict)

    def note(self, incarnation: str, state: WorkerState) -> None:
        """`state`: why it refused."""
        self._latest[incarnation] = _Refusal(state, self.clock.now())

    def state(self, incarnation: str) -> WorkerState | None:
        """What is known of it beyond the view; None: nothing."""
        refusal = self._latest.get(incarnation)
        if refusal is None or self.clock.now() - refusal.at > ASK_AGAIN_S:
            return None
        return refusal.state

    def settle(self, *, asked_at: float) -> None:
        """A view that was asked for at `asked_at` is here: it knows of what was refused well before."""
        self._latest = {who: each for who, each in self._latest.items() if each.at + TOLD_S > asked_at}
