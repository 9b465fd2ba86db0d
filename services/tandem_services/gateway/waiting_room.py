"""Where new choices wait while no worker can take them: a bounded number, each for a bounded time.

Choices that have begun do not need a seat: the gateway owes them an answer until their deadline.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tandem_services.gateway.metrics import GatewayMetrics


class NoSeatError(Exception):
    """As many as may wait are waiting already."""


@dataclass(kw_only=True, slots=True)
class WaitingRoom:
    """One per gateway."""

    seats: int
    metrics: GatewayMetrics
    _taken: int = 0

    @contextmanager
    def seat(self) -> Iterator[None]:
        """Raises `NoSeatError`."""
        if self._taken >= self.seats:
            raise NoSeatError
        self._taken += 1
        self.metrics.waiting_for_worker.set(self._taken)
        try:
            yield
        finally:
            self._taken -= 1
            self.metrics.waiting_for_worker.set(self._taken)
