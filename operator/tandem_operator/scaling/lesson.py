"""What scaling down has taught: a number of workers that proved too few is not gone back to at the same need. Pure.

The need is measured with the workers that are there, and it is another with fewer: batches are larger and each sequence
takes longer, what finds no place becomes backlog, roles compete for what they share, and clients that wait for their
answers ask less while they wait. A steady load can so need 1.7 workers as three see it and 2.2 as two do; going by the
need alone would take the third away and bring it back for ever.

    went down to m at need y ─▶ up again from m within the trial, though no more comes than before it
                             ─▶ m was too few at y: refuted
    refuted                  ─▶ down to m only for a need that is smaller than y by more than the tolerance
    that one holds           ─▶ forgotten

The trial lasts as long as a backlog may take to be cleared, and more to be wanted: by then the effect has shown itself.
A load that has grown meanwhile, by what comes per second, says nothing against m.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Reduction:
    """Of a role's workers."""

    at: float
    workers: int
    """That were left."""
    need: float
    """The most that was needed throughout the window before, as those who were there then saw it."""
    arrivals: float
    """The most that came per second throughout that window."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """Of one role."""

    on_trial: Reduction | None = None
    refuted: Reduction | None = None

    def went_down(self, reduction: Reduction) -> "Lesson":
        """From now on it is on trial."""
        return replace(self, on_trial=reduction)

    def went_up(self, at: float, before: int, arrivals: float, trial_s: float) -> "Lesson":
        """More were needed than `before`, while so much came per second."""
        last = self.on_trial
        if last is None or last.workers != before:
            return replace(self, on_trial=None)
        if at - last.at > trial_s:
            return Lesson()
        return Lesson(refuted=last if arrivals <= last.arrivals else self.refuted)

    def fewest(self, need: float, tolerance: float) -> int:
        """Workers that must be left at a need of `need`, the most of the window; 0 where nothing speaks against any."""
        if self.refuted is None or need < self.refuted.need * (1 - tolerance):
            return 0
        return self.refuted.workers + 1
