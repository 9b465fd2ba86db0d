"""How many drafts a request takes: as many as pay, and none when none do.

With acceptance rate a per draft, a run of d drafts yields (1 − a^(d+1)) / (1 − a) tokens on average and costs
1 + c·d decode steps, c being the price of one draft (`step_costs`). The length is the d with the best yield per
cost; it is 0 when the request's rate is below about c.

    drafting ──rate too low──▶ paused for `pause` tokens ──▶ one draft as a probe ──accepted──▶ drafting
                                     ▲ twice as long                     └──rejected──┐
                                     └────────────────────────────────────────────────┘

Nothing here changes an output, so it may depend on measured time.
"""

from dataclasses import dataclass, field

from tandem_engine.speculative.step_costs import StepCosts

PRIOR_RATE = 0.7
"""Acceptance that a request is credited with at first: high enough to try, gone after a few rejections."""
RATE_WEIGHT = 0.2
"""Weight of the newest draft in a request's acceptance rate."""
FIRST_PAUSE = 16
LONGEST_PAUSE = 256
"""Tokens between two probes of a request whose drafts never please."""
NEAR_CERTAIN = 0.95
"""Where not even drafts that are this good would pay, nobody probes."""


@dataclass(kw_only=True, slots=True)
class Acceptance:
    """What a request has taught about its drafts."""

    rate: float = PRIOR_RATE
    """Moving mean of accepted (1) and rejected (0) drafts. Drafts behind a rejected one say nothing."""
    paused_until: int = 0
    """No drafts before the request has so many tokens."""
    pause: int = FIRST_PAUSE
    """Tokens that the next pause takes."""


@dataclass(kw_only=True, slots=True)
class DraftLengths:
    """Chooses lengths for all requests of an engine."""

    longest: int
    """Drafts of one step at most."""
    adaptive: bool = True
    """False: always the longest."""
    costs: StepCosts = field(default_factory=StepCosts)

    def open(self, batch: int) -> bool:
        """Whether anybody may draft in a step of `batch` requests."""
        return not self.adaptive or self._best(NEAR_CERTAIN, batch) > 0

    def choose(self, acceptance: Acceptance, *, seq_len: int, batch: int) -> int:
        """Drafts for a request of `seq_len` tokens in a step of `batch` requests."""
        if not self.adaptive:
            return self.longest
        if seq_len < acceptance.paused_until:
            return 0
        return max(1, self._best(acceptance.rate, batch))

    def learn(self, acceptance: Acceptance, *, drafted: int, accepted: int, seq_len: int, batch: int) -> None:
        """A request of `seq_len` tokens was offered `drafted` drafts and accepted `accepted`."""
        rate = acceptance.rate
        for _ in range(accepted):
            rate += RATE_WEIGHT * (1.0 - rate)
        if accepted < drafted:
            rate -= RATE_WEIGHT * rate
        acceptance.rate = rate
        if self._best(rate, batch) > 0:
            acceptance.pause = FIRST_PAUSE
            return
        acceptance.paused_until = seq_len + acceptance.pause
        acceptance.pause = min(2 * acceptance.pause, LONGEST_PAUSE)

    def _best(self, rate: float, batch: int) -> int:
        """The length with the most tokens per cost; 0 when plain decoding is at least as good."""
        price = self.costs.price(batch)
        best, best_yield, tokens, alive = 0, 1.0, 1.0, 1.0
        for length in range(1, self.longest + 1):
            alive *= rate
            tokens += alive
            if tokens / (1.0 + price * length) > best_yield:
                best, best_yield = length, tokens / (1.0 + price * length)
        return best
