"""How many drafts each request of a step takes: as many as increase tokens per second, or none.

With acceptance rate a per draft, the j-th draft of a request adds a^j tokens to the step on average. Each costs the
same, and the first of a step costs more: it ends the overlap with the step before, and a network has to compute the
text since its last draft. So a step takes the drafts of greatest gain of all its requests, up to the number n that
maximizes

    (requests + gains of the best n) / (fixed + n · draft)   tokens per second
if that is `WORTHWHILE` times the rate without drafts. No output depends on it, so it may use measured time.

`StepCosts` has the seconds of a step: `plain_s` without drafts, `fixed_s + draft_s · drafts` with them. More tokens
cost almost nothing where weights are read for one request, and almost proportionally where arithmetic is the limit. So
batches of similar size share means, and the line is fitted to them; with equally many drafts in all steps it goes
through the plain steps. What slows all steps for a while (another process, a lower clock) is a separate factor that
divides out.

`Trials` decides when to measure again, in completed steps of a size, so it is the same on every rank:

    plain ──▶ drafting, while it pays ──`stretch` steps in a row──▶ plain, then drafting for twice as long
                 │ no drafts pay                ▲
                 ▼                              │ they do
              resting ──`rest` steps──▶ trial ──┤
                 ▲                              │ they do not, or not for long: rest twice as long
                 └──────────────────────────────┘

All requests try in the same few steps; one by one they would end the overlap each time.

`TurnTimer` measures steps by the beginnings of iterations, where the clock that ranks agree on advances. In a run of
steps of one kind that difference is the cost of a step, hidden parts included. Where the kind changes, proposing counts
for the step with the drafts, and steps that hid nothing, or whose network had more text to compute, are not typical.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem_engine.base.clock import Clock
from tandem_engine.base.recording import estimating, recording

MIN_WEIGHT = 0.1
"""Of the newest measurement in the moving means; the n-th weighs 1 / n until that is less."""

PACE_WEIGHT = 0.3
"""And in the pace."""

OUTLIER = 0.5
"""Of what was expected, by which a measurement may differ: a machine that was busy elsewhere says little."""

ASSUMED_DRAFT = 0.1
"""Plain steps that a draft of every request costs, until a batch of about that size has been measured."""

RIDGE = 0.25
"""Spread of drafts per request, squared, below which the slope is rather that of the line through plain steps."""


class StepPrices(NamedTuple):
    """Of steps of one batch. Units are common to the three."""

    plain: float
    fixed: float
    """Of a step with drafts, before the first."""
    draft: float
    """Of each draft."""


@dataclass(slots=True)
class PlainSteps:
    """Moving mean of steps without drafts."""

    seconds: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        """A step took so long."""
        self.count += 1
        self.seconds += _weight(self.count) * (_likely(seconds, self.seconds) - self.seconds)


@dataclass(slots=True)
class DraftedSteps:
    """Moving moments of steps with drafts: drafts per request (x) and seconds (y)."""

    drafts: float = 0.0
    seconds: float = 0.0
    spread: float = 0.0
    """Variance of x."""
    together: float = 0.0
    """Covariance of x and y."""
    count: int = 0

    def add(self, drafts: float, seconds: float, *, plain_s: float) -> None:
        """A step had so many drafts per request and took so long, and one without takes `plain_s`."""
        x = drafts - self.drafts
        y = _likely(seconds, self.expected(drafts, plain_s)) - self.seconds
        self.count += 1
        weight = _weight(self.count)
        self.drafts += weight * x
        self.seconds += weight * y
        self.spread = (1.0 - weight) * (self.spread + weight * x * x)
        self.together = (1.0 - weight) * (self.together + weight * x * y)

    def expected(self, drafts: float, plain_s: float) -> float:
        """Seconds of a step with so many drafts per request; 0 when nothing is known."""
        return self.seconds + self.slope(plain_s) * (drafts - self.drafts) if self.count else 0.0

    def slope(self, plain_s: float) -> float:
        """Seconds by which one draft more per request prolongs a step; a step never costs less than a plain one."""
        if not self.drafts:
            return 0.0  # no drafted step has proposed a draft yet
        through_plain = max(0.0, self.seconds - plain_s) / self.drafts
        fitted = (self.together + RIDGE * through_plain) / (self.spread + RIDGE)
        return min(max(0.0, fitted), through_plain)


@dataclass(slots=True)
class SizeCosts:
    """What is known of batches of about one size."""

    plain: PlainSteps = field(default_factory=PlainSteps)
    drafted: DraftedSteps = field(default_factory=DraftedSteps)
    pace: float = 1.0
    """Seconds that a second of the means takes at present."""

    def add_plain(self, seconds: float) -> None:
        expected = self.plain.seconds
        self.plain.add(seconds / self.pace)
        self._keep_pace(seconds, expected)

    def add_drafted(self, drafts: float, seconds: float) -> None:
        expected = self.drafted.expected(drafts, self.plain.seconds)
        self.drafted.add(drafts, seconds / self.pace, plain_s=self.plain.seconds)
        self._keep_pace(seconds, expected)

    def _keep_pace(self, seconds: float, expected: float) -> None:
        """`expected` at pace 1; 0 when nothing was."""
        if expected > 0.0:
            self.pace += PACE_WEIGHT * (_likely(seconds / expected, self.pace) - self.pace)

    def prices(self, batch: int) -> StepPrices:
        plain_s, drafted = self.plain.seconds, self.drafted
        if plain_s == 0.0 or drafted.seconds == 0.0:
            return StepPrices(plain=1.0, fixed=1.0, draft=ASSUMED_DRAFT / batch)
        slope = drafted.slope(plain_s)
        fixed = max(plain_s, drafted.seconds - slope * drafted.drafts)
        return StepPrices(plain=plain_s, fixed=fixed, draft=slope / batch)


@dataclass(kw_only=True, slots=True)
class StepCosts:
    """Costs by batch size. Scheduler thread only."""

    _sizes: dict[int, SizeCosts] = field(default_factory=dict)

    def prices(self, batch: int) -> StepPrices:
        """Of steps of `batch` requests; in plain steps as long as nothing is known."""
        return self._of(batch).prices(batch)

    @recording
    def plain(self, batch: int, seconds: float) -> None:
        """A step of `batch` requests without drafts took so long."""
        self._of(batch).add_plain(seconds)

    @recording
    def drafted(self, batch: int, drafts: int, seconds: float) -> None:
        """A step of `batch` requests that verified `drafts` took so long, proposing them included."""
        self._of(batch).add_drafted(drafts / batch, seconds)

    def _of(self, batch: int) -> SizeCosts:
        return self._sizes.setdefault(size_class(batch), SizeCosts())


def size_class(batch: int) -> int:
    """Sizes between two powers of two are about the same."""
    return batch.bit_length()


def _weight(count: int) -> float:
    return max(MIN_WEIGHT, 1.0 / count)


def _likely(seconds: float, expected: float) -> float:
    """`seconds`, or what is nearest to it of what can be believed. Anything can be, where nothing is expected."""
    if expected == 0.0:
        return seconds
    return min(max(seconds, (1.0 - OUTLIER) * expected), (1.0 + OUTLIER) * expected)


FIRST_PLAIN_STEPS = 6

PLAIN_STEPS = 3
"""Plain steps in a row, to be measured: the first, behind drafts, is none that tells."""

FIRST_STRETCH = 16

MAX_STRETCH = 256
"""Steps with drafts in a row, between plain ones that are measured."""

TRIAL_STEPS = 3

LASTING = 8
"""Steps with drafts in a row that show a gain to last."""

FIRST_REST = 32

MAX_REST = 1024
"""Plain steps between two trials that show no lasting gain."""


@dataclass(slots=True)
class Trials:
    """Of one size. Nothing is known at first."""

    plain_left: int = FIRST_PLAIN_STEPS
    """Steps that go without drafts in any case."""
    trial_left: int = 0
    """Steps that take drafts in any case, as soon as there are some."""
    rest: int = FIRST_REST
    until_trial: int = FIRST_REST
    stretch: int = FIRST_STRETCH
    in_a_row: int = 0
    """Steps with drafts since the last plain one."""

    def plain(self) -> None:
        """A step without drafts has settled."""
        self.in_a_row = 0
        self.plain_left = max(0, self.plain_left - 1)
        self.until_trial -= 1
        if self.until_trial == 0:
            self.trial_left = TRIAL_STEPS

    def drafted(self) -> None:
        """A step with drafts has settled."""
        self.in_a_row += 1
        if self.in_a_row == self.stretch:
            self.in_a_row, self.plain_left = 0, PLAIN_STEPS
            self.stretch = min(2 * self.stretch, MAX_STRETCH)
        if self.in_a_row == LASTING:
            self.rest = FIRST_REST
        if self.trial_left:
            self.tried()
        else:
            self.until_trial = self.rest

    def tried(self) -> None:
        """One of the steps of a trial has run, with or without drafts."""
        self.trial_left -= 1
        if self.trial_left == 0:
            self.until_trial = self.rest
            self.rest = min(2 * self.rest, MAX_REST)


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

MAX_PAUSE = 256
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

    @estimating(lambda *_, **__: False)
    def open(self, acceptances: Iterable[Acceptance], *, batch: int) -> bool:
        """Whether it is worth looking for drafts in a step of `batch` requests with these `acceptances`.

        Cheap, for it is asked in every step: not if it would not pay were all of them as good as the best.
        """
        if not self.adaptive:
            return True
        trials = self._trials_of(batch)
        return trials.plain_left == 0 and (
            trials.trial_left > 0 or self._could_pay(max(map(self._rate, acceptances)), batch)
        )

    @estimating(lambda _, seekers, **__: [0] * len(seekers))
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

    @recording
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
        acceptance.pause = min(2 * acceptance.pause, MAX_PAUSE)

    @recording
    def settled(self, *, batch: int, drafted: bool) -> None:
        """A step of `batch` requests is over."""
        trials = self._trials_of(batch)
        if drafted:
            trials.drafted()
        else:
            trials.plain()

    @recording
    def count_without_drafts(self, *, batch: int) -> None:
        """There were no drafts for a step of `batch` requests that was to have some."""
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


class Settled(NamedTuple):
    """A step of decodes and nothing else."""

    batch: int
    drafts: int
    """That it verified; 0 for a plain step."""
    propose_s: float


class Timed(NamedTuple):
    """A step that tells what others like it will cost."""

    step: Settled
    seconds: float


@dataclass(kw_only=True, slots=True)
class TurnTimer:
    """Times the turns of one loop."""

    clock: Clock
    catches_up: bool
    """Whether the first proposal after a pause costs more."""
    _began: float = 0.0
    _settled: Settled | None = None
    """By this turn."""
    _representative: bool = True
    _drafted_before: bool = False
    """The last step that settled had drafts."""
    _asked: bool = False
    """This turn asked for drafts."""
    _propose_s: float = 0.0
    """Of this turn."""

    def begin_turn(self) -> Timed | None:
        """The turn before is over. What it settled, with its time, if that is representative."""
        now = self.clock.now()
        timed = self._timed(now - self._began)
        self._began, self._settled, self._asked, self._propose_s = now, None, False, 0.0
        return timed

    def interrupt(self) -> None:
        """What follows is no turn: the engine sleeps, or stands still."""
        self._settled = None

    def count_proposal(self, propose_s: float) -> None:
        """The proposer was asked for drafts, and took so long."""
        self._asked = True
        self._propose_s += propose_s

    def settled(self, step: Settled) -> None:
        """This turn has settled `step`."""
        self._settled = step
        drafted = step.drafts > 0
        self._representative = drafted == self._drafted_before or (drafted and not self.catches_up)
        self._drafted_before = drafted

    def _timed(self, turn_s: float) -> Timed | None:
        step = self._settled
        if step is None or not self._representative or (self._asked and not step.drafts):
            return None
        seconds = turn_s - self._propose_s + step.propose_s
        return Timed(step, seconds) if seconds > 0.0 else None
