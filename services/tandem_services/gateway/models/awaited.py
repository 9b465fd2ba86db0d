"""A model that is served as soon as workers have sent its tokenizer.

Its requests are answered with 503 and Retry-After. They are reported as waiting until clients have had time to repeat
them: a fleet that is scaled to zero gets its first worker, which sends the tokenizer, because of them.
"""

from collections import deque
from dataclasses import dataclass, field

from tandem_engine.base.clock import Clock
from tandem_engine.base.logs import quoted
from tandem_services.common.errors import ApiError, unavailable
from tandem_services.common.metrics import MetricFamilies
from tandem_services.gateway.observe.metrics import GatewayMetrics
from tandem_services.gateway.queueing.admission import QueueMetrics
from tandem_services.gateway.queueing.late_binding import QueueFigures

RETRY_S = 2.0
"""For clients: the tokenizer is requested about as often."""

REPORTED_S = 10.0
"""How long a refused request is reported as waiting: several scrapes."""

MAX_REPORTED = 1024
"""Requests that are reported at a time."""


@dataclass(kw_only=True, slots=True)
class AwaitedModel:
    """Belongs to one event loop."""

    names: tuple[str, ...]
    """The model's own, followed by its aliases."""
    clock: Clock
    families: MetricFamilies
    is_unloadable: bool = False
    """Workers have sent it, and it cannot be loaded."""
    _refused: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_REPORTED))
    _metrics: QueueMetrics = field(init=False)

    def __post_init__(self) -> None:
        # All series of a model, which a scraper expects together.
        GatewayMetrics(self.families, model=self.names[0])
        self._metrics = QueueMetrics(self.families, model=self.names[0])
        self._metrics.watch(self._figures)
        self.report()

    def refusal(self, name: str) -> ApiError:
        """The answer to a request for it, by one of its names."""
        self._refused.append(self.clock.now())
        self.report()
        why = "its tokenizer cannot be loaded" if self.is_unloadable else "no worker has sent its tokenizer"
        return unavailable(f"The model '{quoted(name)}' is not served yet: {why}.", retry_after=RETRY_S)

    def report(self) -> None:
        """To be called about once a second."""
        self._forget()
        self._metrics.waiting({"": len(self._refused)} if self._refused else {})

    def close(self) -> None:
        """It is served now, or not wanted any more: nothing waits here."""
        self._refused.clear()
        self.report()

    def _forget(self) -> None:
        while self._refused and self.clock.now() - self._refused[0] > REPORTED_S:
            self._refused.popleft()

    def _figures(self) -> QueueFigures:
        self._forget()
        oldest = self.clock.now() - self._refused[0] if self._refused else 0.0
        return QueueFigures(prompt_tokens=0, oldest_wait_s=oldest, held=len(self._refused))
