"""How many drafts each request of a step takes: as many as make tokens come faster, and none when none do.

With acceptance rate a per draft, the j-th draft of a request adds a^j tokens to the step on average. Each costs the
same (`step_costs`), and the first of a step costs more: it ends the overlap with the step before, and a network has to
catch up with the text. So a step takes the drafts of greatest gain of all its requests, up to the number n where

    (requests + gains of the best n) / (fixed + n · draft)   tokens per second

is greatest, if that is `WORTHWHILE` times what the same requests yield without drafts. What does not pay is tried again
now and then: by everybody at a time (`trials`), and by single requests along with others whose drafts pay.

Nothing here changes an output, so it may depend on measured time.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem_engine.speculative.step_costs import StepCosts, size_class
from tandem_engine.speculative.trials import Trials

PRIOR_RATE = 0.7
"""Acceptance that the first requests are credited with: high enough to try, gone after a few rejections."""
RATE_WEIGHT = 0.1
"""Weight of the newest draft in a request's acceptance rate."""
TYPICAL_WEIGHT = 0.02
"""And in the rate that new requests are credited with."""
WORTHWHILE = 1.1
"""Least gain for which the overlap of steps is given up: below, it may be an error of measurement."""
TRIAL_DRAFTS = 2
"""Drafts of each request in a trial."""
FIRST_PAUSE = 16
LONGEST_PAUSE = 256
"""Tokens between two drafts of a request whose drafts never please, while those of others do."""


@dataclass(kw_only=True, slots=True)
class Acceptance:
    """What a request has taught about its drafts."""

    rate: float | None = None
    """Moving mean of accepted (1) and rejected (0) drafts; those behind a rejected one say nothing. None: unknown."""
    retry_at: int = 0
    """Tokens that the request has when it may take a draft again that does not pay."""
    pause: int = FIRST_PAUSE
    """Tokens until then, after the next rejection."""


class Seeker(NamedTuple):
    """A request that could take drafts."""

    acceptance: Acceptance
    seq_len: int
    limit: int
    """At least 1."""


@dataclass(kw_only=True, slots=True)
class DraftLengths:
    """Chooses lengths for all requests of an engine."""

    longest: int
    """Drafts of a request and step at most."""
    adaptive: bool = True
    """False: always the longest."""
    costs: StepCosts = field(default_factory=StepCosts)
    typical: float = PRIOR_RATE
    """Acceptance rate of requests that have not drafted yet: the moving mean of all."""
    _trials: dict[int, Trials] = field(default_factory=dict)

    def open(self, acceptances: Iterable[Acceptance], *, batch: int) -> bool:
        """Whether it is worth asking who has drafts in a step of `batch` requests with these `acceptances`.

        Cheap, for it is asked in every step: not if it would not pay were all of them as good as the best.
        """
        if not self.adaptive:
            return True
        trials = self._trials_of(batch)
        return trials.plain_left == 0 and (
            trials.trial_left > 0 or self._could_pay(max(map(self._rate, acceptances)), batch)
        )

    def choose(self, seekers: Sequence[Seeker], *, batch: int) -> list[int]:
        """Drafts for each of `seekers` in a step of `batch` requests, they among them."""
        if not self.adaptive:
            return [min(self.longest, seeker.limit) for seeker in seekers]
        trials = self._trials_of(batch)
        if trials.plain_left:
            return [0] * len(seekers)
        lengths = self._that_pay(seekers, batch)
        if any(lengths):
            return [length or _retries(seeker) for length, seeker in zip(lengths, seekers, strict=True)]
        if trials.trial_left:
            return [min(TRIAL_DRAFTS, self.longest, seeker.limit) for seeker in seekers]
        return lengths

    def learn(self, acceptance: Acceptance, *, drafted: int, accepted: int, seq_len: int) -> None:
        """A request of `seq_len` tokens was offered `drafted` drafts and accepted `accepted`."""
        rate = self._rate(acceptance)
        for right in [1.0] * accepted + [0.0] * (accepted < drafted):
            rate += RATE_WEIGHT * (right - rate)
            self.typical += TYPICAL_WEIGHT * (right - self.typical)
        acceptance.rate = rate
        if accepted:
            acceptance.pause = FIRST_PAUSE
            return
        acceptance.retry_at = seq_len + acceptance.pause
        acceptance.pause = min(2 * acceptance.pause, LONGEST_PAUSE)

    def settled(self, *, batch: int, drafted: bool) -> None:
        """A step of `batch` requests is over."""
        trials = self._trials_of(batch)
        if drafted:
            trials.drafted()
        else:
            trials.plain()

    def asked_in_vain(self, *, batch: int) -> None:
        """Nobody had drafts for a step of `batch` requests that was to have some."""
        trials = self._trials_of(batch)
        if trials.trial_left:
            trials.tried()

    def _that_pay(self, seekers: Sequence[Seeker], batch: int) -> list[int]:
        prices = self.costs.prices(batch)
        gains = sorted(self._gains(seekers), reverse=True)
        best, speed, tokens = 0, WORTHWHILE * batch / prices.plain, float(batch)
        for count, (gain, _) in enumerate(gains, start=1):
            tokens += gain
            if tokens / (prices.fixed + count * prices.draft) > speed:
                best, speed = count, tokens / (prices.fixed + count * prices.draft)
        taken = Counter(place for _, place in gains[:best])
        return [taken[place] for place in range(len(seekers))]

    def _gains(self, seekers: Sequence[Seeker]) -> list[tuple[float, int]]:
        """Tokens expected of each possible draft, and whose it is. A request's own get fewer from one to the next."""
        gains = []
        for place, seeker in enumerate(seekers):
            rate = self._rate(seeker.acceptance)
            gain = 1.0
            for _ in range(min(self.longest, seeker.limit)):
                gain *= rate
                gains.append((gain, place))
        return gains

    def _could_pay(self, rate: float, batch: int) -> bool:
        prices = self.costs.prices(batch)
        tokens, gain = 1.0, 1.0
        for length in range(1, self.longest + 1):
            gain *= rate
            tokens += gain
            if tokens * prices.plain > WORTHWHILE * (prices.fixed + length * batch * prices.draft):
                return True
        return False

    def _rate(self, acceptance: Acceptance) -> float:
        return self.typical if acceptance.rate is None else acceptance.rate

    def _trials_of(self, batch: int) -> Trials:
        return self._trials.setdefault(size_class(batch), Trials())


def _retries(seeker: Seeker) -> int:
    """One draft beside those of others, when it is time."""
    return int(seeker.seq_len >= seeker.acceptance.retry_at)
