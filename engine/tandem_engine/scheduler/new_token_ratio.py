"""How much of their allowed output requests are expected to use.

Most requests stop long before max_tokens; reserving all of it would leave the pool half empty. So
admission reserves a share, which shrinks with each decode step that went well and is set back by a
retraction, that is, when the guess was too low.
"""

from dataclasses import dataclass, field

from tandem_engine.config import SchedulerConfig


@dataclass(kw_only=True, slots=True)
class NewTokenRatio:
    """Share of the remaining output tokens, between the configured minimum and initial value."""

    config: SchedulerConfig
    value: float = field(init=False)

    def __post_init__(self) -> None:
        self.value = self.config.init_new_token_ratio

    def decay(self) -> None:
        """A decode step found room for everybody."""
        span = self.config.init_new_token_ratio - self.config.min_new_token_ratio
        step = span / max(1, self.config.new_token_ratio_decay_steps)
        self.value = max(self.config.min_new_token_ratio, self.value - step)

    def reset(self) -> None:
        """A request had to be retracted."""
        self.value = self.config.init_new_token_ratio
