"""Time for tests of services: moves on demand."""


class ServiceClock:
    """A `Clock` that starts at 1000 seconds."""

    def __init__(self) -> None:
        self._now = 1000.0

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds
