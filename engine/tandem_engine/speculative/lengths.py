"""How many drafts a request takes: as many as pay, and none when none do.

With acceptance rate a per draft, a run of d drafts yields (1 − a^(d+1)) / (1 − a) tokens on average and costs
1 + c·d steps, c being the price of one draft in decode steps: proposing it, and verifying it. The length
is the d with the best yield per cost; it is 0 when the request's rate is below about c.

    drafting ──rate too low──▶ paused for `pause` tokens ──▶ one draft as a probe ──accepted──▶ drafting
                                     ▲ twice as long                     └──rejected──┐
                                     └────────────────────────────────────────────────┘

Nothing here changes an output, so it may depend on measured time.
"""

from dataclasses import dataclass

PRIOR_RATE = 0.7
"""Acceptance that a request is credited with at first: high enough to try, gone after a few rejections."""
RATE_WEIGHT = 0.2
"""Weight of the newest draft in a request's acceptance rate."""
COST_WEIGHT = 0.1
VERIFY_COST = 0.08
"""Price of one more token in a forward, in decode steps of the same batch."""
FIRST_PAUSE = 16
LONGEST_PAUSE = 256
"""Tokens between two probes of a request whose drafts never please."""


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
    propose_cost: float = 0.0
    """Moving mean of the price of proposing one draft, in steps."""

    def choose(self, acceptance: Acceptance, seq_len: int) -> int:
        """Drafts for the next step of a request of `seq_len` tokens."""
        if not self.adaptive:
            return self.longest
        if seq_len < acceptance.paused_until:
            return 0
        return max(1, self._best(acceptance.rate))

    def learn(self, acceptance: Acceptance, *, drafted: int, accepted: int, seq_len: int) -> None:
        """A request of `seq_len` tokens was offered `drafted` drafts and accepted `accepted`."""
        rate = acceptance.rate
        for _ in range(accepted):
            rate += RATE_WEIGHT * (1.0 - rate)
        if accepted < drafted:
            rate -= RATE_WEIGHT * rate
        acceptance.rate = rate
        if self._best(rate) > 0:
            acceptance.pause = FIRST_PAUSE
            return
        acceptance.paused_until = seq_len + acceptance.pause
        acceptance.pause = min(2 * acceptance.pause, LONGEST_PAUSE)

    def measure(self, *, propose_s: float, longest_chain: int, compute_s: float) -> None:
        """A step whose chains had up to `longest_chain` drafts spent so much on proposing and on computing."""
        if compute_s > 0.0:
            cost = propose_s / longest_chain / compute_s
            self.propose_cost += COST_WEIGHT * (cost - self.propose_cost)

    def _best(self, rate: float) -> int:
        """The length with the most tokens per cost; 0 when plain decoding is at least as good."""
        price = self.propose_cost + VERIFY_COST
        best, best_yield, tokens, alive = 0, 1.0, 1.0, 1.0
        for length in range(1, self.longest + 1):
            alive *= rate
            tokens += alive
            if tokens / (1.0 + price * length) > best_yield:
                best, best_yield = length, tokens / (1.0 + price * length)
        return best
