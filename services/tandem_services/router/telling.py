"""Which decisions tell what they chose from: all, as long as there are not many.

It takes Redis, router and journal some microseconds and bytes, which nobody notices at a hundred decisions a second and
somebody may at five thousand. Those of a busy second are a sample: its first ones.
"""

from dataclasses import dataclass

from tandem_engine.clock import Clock


@dataclass(kw_only=True, slots=True)
class TellingBudget:
    """One per router."""

    clock: Clock
    per_second: int
    """0: none tells."""
    _second: int = -1
    _spent: int = 0

    def spend(self) -> bool:
        """Whether this decision tells."""
        second = int(self.clock.now())
        if second != self._second:
            self._second, self._spent = second, 0
        if self._spent >= self.per_second:
            return False
        self._spent += 1
        return True
