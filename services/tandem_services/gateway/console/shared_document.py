"""One JSON document for all viewers: built when somebody looks, and at most once in a while however many look."""

from collections.abc import Callable
from dataclasses import dataclass

from tandem_engine.clock import Clock
from tandem_services.gateway.answer_format import encode_json

KEPT_S = 1.0
"""The router's view of the fleet is not renewed more often (`router.keys.HEARTBEAT_S`)."""


@dataclass(kw_only=True, slots=True)
class SharedDocument:
    """Nobody looking costs nothing; a further viewer costs the sending of bytes that are there."""

    build: Callable[[], object]
    """Called on the event loop: about a millisecond for 64 workers (benchmarks/console_cost.py)."""
    clock: Clock
    builds: int = 0
    _bytes: bytes = b""
    _built_at: float = float("-inf")

    def current(self) -> bytes:
        """No older than `KEPT_S`."""
        now = self.clock.now()
        if now - self._built_at >= KEPT_S:
            self._bytes, self._built_at = encode_json(self.build()), now
            self.builds += 1
        return self._bytes
