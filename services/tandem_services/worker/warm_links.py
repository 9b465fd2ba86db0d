"""Whether the links to this worker's first peers have been tested: until then a pod is not said to be ready.

    not introduced ─▶ introduced ─▶ each link has a figure, or a reason why it has none ─▶ warm, for good
                        nobody is there to be introduced to ─▶ warm        `patience_s` are over ─▶ warm

Peers that come later are measured while it serves. A link that fails its test does not keep the worker back either: it
is slow or broken, which metrics, registry and router know; requests go another way.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tandem_engine.clock import Clock
from tandem_engine.messages.engine_stats import LinkReport
from tandem_engine.messages.requests import Peer


@dataclass(kw_only=True, slots=True)
class WarmLinks:
    """A readiness check (`common.health.Check`)."""

    clock: Clock
    patience_s: float
    """From the first question on; 0: nothing is waited for."""
    named: Callable[[], tuple[Peer, ...] | None]
    """Whom the engine was told to meet; None: nobody has looked yet."""
    links: Callable[[], tuple[LinkReport, ...]]
    _asked_at: float | None = None
    _warm: bool = False

    def check(self) -> str | None:
        """What is missing."""
        if self._warm:
            return None
        now = self.clock.now()
        self._asked_at = now if self._asked_at is None else self._asked_at
        missing = self._missing()
        self._warm = missing is None or now - self._asked_at >= self.patience_s
        return None if self._warm else missing

    def _missing(self) -> str | None:
        peers = self.named()
        if peers is None:
            return "not introduced to its peers yet"
        tested = {link.peer for link in self.links() if link.bytes_per_s > 0 or link.problem or link.broken}
        untested = [peer.worker_id for peer in peers if peer.incarnation not in tested]
        return f"{len(untested)} of {len(peers)} links are not tested yet" if untested else None
