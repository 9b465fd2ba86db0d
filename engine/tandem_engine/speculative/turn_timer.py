"""How long decode steps take of the loop's time, drafts and lost overlap included.

A turn of the loop settles one step, and launches the next before that or after it. In a steady run of steps of one
kind, from the beginning of one turn to that of the next is therefore what a step costs, whatever of it is hidden
behind what. Where the kind changes, a turn holds parts of two steps:

    proposing     belongs to the step that is launched with the drafts: taken out, and added to that step's turn
    plain, but behind drafts, or settled first to take drafts: nothing was hidden, as of most plain steps there is
    drafts of a network that it did not ask in the step before: it had more text to catch up with than usual

Reads a clock at the beginning of turns alone, because the clock that ranks agree on moves only there.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tandem_engine.clock import Clock


class Settled(NamedTuple):
    """A step of decodes and nothing else."""

    batch: int
    drafts: int
    """That it verified; 0 for a plain step."""
    propose_s: float


class Timed(NamedTuple):
    """A step that tells what others like it will cost."""

    step: Settled
    seconds: float


@dataclass(kw_only=True, slots=True)
class TurnTimer:
    """Times the turns of one loop."""

    clock: Clock
    catches_up: bool
    """Whether the first proposal after a pause costs more."""
    _began: float = 0.0
    _settled: Settled | None = None
    """By this turn."""
    _representative: bool = True
    _drafted_before: bool = False
    """The last step that settled had drafts."""
    _asked: bool = False
    """This turn asked for drafts."""
    _propose_s: float = 0.0
    """Of this turn."""

    def begin_turn(self) -> Timed | None:
        """The turn before is over. What it settled, with its time, if that is representative."""
        now = self.clock.now()
        timed = self._timed(now - self._began)
        self._began, self._settled, self._asked, self._propose_s = now, None, False, 0.0
        return timed

    def interrupt(self) -> None:
        """What follows is no turn: the engine sleeps, or stands still."""
        self._settled = None

    def asked(self, propose_s: float) -> None:
        """Somebody was asked for drafts, and took so long."""
        self._asked = True
        self._propose_s += propose_s

    def settled(self, step: Settled) -> None:
        """This turn has settled `step`."""
        self._settled = step
        drafted = step.drafts > 0
        self._representative = drafted == self._drafted_before or (drafted and not self.catches_up)
        self._drafted_before = drafted

    def _timed(self, turn_s: float) -> Timed | None:
        step = self._settled
        if step is None or not self._representative or (self._asked and not step.drafts):
            return None
        seconds = turn_s - self._propose_s + step.propose_s
        return Timed(step, seconds) if seconds > 0.0 else None
