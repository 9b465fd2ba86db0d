"""How often a gateway asks again, so that workers in trouble are not asked ever more.

A token bucket over all requests: each attempt that a living worker has failed costs one token before there is another.
Tokens come with new choices (`share` each) and with time (`per_second`), up to `capacity`. A choice whose worker died,
or lets go because it leaves, costs nothing: it asks for no more than what was accepted before.
"""

from dataclasses import dataclass, field

from tandem_engine.clock import Clock


@dataclass(kw_only=True, slots=True)
class RetryBudget:
    """One per model service."""

    clock: Clock
    share: float = 0.2
    per_second: float = 5.0
    capacity: float = 64.0
    """Full at the start: many requests of one worker may fail at once."""
    _tokens: float = field(init=False)
    _counted_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._tokens, self._counted_at = self.capacity, self.clock.now()

    def choice_began(self) -> None:
        self._add(self.share)

    def spend(self) -> bool:
        """Take a token. False when there is none."""
        now = self.clock.now()
        self._add((now - self._counted_at) * self.per_second)
        self._counted_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    @property
    def wait_s(self) -> float:
        """Until there may be a token again, if nobody else takes it."""
        return 1 / self.per_second

    def _add(self, tokens: float) -> None:
        self._tokens = min(self.capacity, self._tokens + tokens)
