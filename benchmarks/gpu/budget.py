"""A run has an end: whoever lends a GPU lends it for minutes."""

import time
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Budget:
    """Seconds for all sections of a run."""

    seconds: float
    skipped: list[str] = field(default_factory=list)
    """Sections that no longer fitted."""
    _began: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        return self._began + self.seconds - time.monotonic()

    def allows(self, section: str, *, needs_s: float) -> bool:
        """Whether `section`, which takes about so long, still fits; remembered if not."""
        if self.left_s >= needs_s:
            return True
        self.skipped.append(f"{section}: about {needs_s:.0f} s needed, {max(0.0, self.left_s):.0f} s left")
        return False
