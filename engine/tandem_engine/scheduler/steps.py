"""Step numbers: which steps were launched, which have settled.

Steps are numbered from 1 and settle in launch order, at most one behind in overlap mode. Whoever gives
back memory passes `newest_in_flight`, so that what a step may still write to waits for it [page-fence].
"""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class Steps:
    """Counts of the one scheduler."""

    launched: int = 0
    settled: int = 0

    def launch(self) -> int:
        """The number of the step that is launched now."""
        self.launched += 1
        return self.launched

    def settle(self, step: int) -> None:
        """`step` is over, for good or ill."""
        assert step == self.settled + 1, f"step {step} settled after step {self.settled}"
        self.settled = step

    @property
    def newest_in_flight(self) -> int | None:
        """The newest step that has not settled, None when there is none."""
        return self.launched if self.launched > self.settled else None
