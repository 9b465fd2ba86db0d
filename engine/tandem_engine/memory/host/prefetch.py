"""Reading a request's prefix from storage while the request waits for its turn."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem_engine.memory.host.blocks import HostBlock


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefetch:
    """Blocks on their way from storage to host memory, for one request."""

    blocks: Sequence[HostBlock]
    until: float
    """Monotonic time after which the request goes on without what is missing."""

    @property
    def done(self) -> bool:
        """Whether every block is there, or will not come."""
        return not any(block.loading for block in self.blocks)
