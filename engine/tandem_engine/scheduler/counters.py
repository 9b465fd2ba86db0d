"""Counters of the scheduler, and the numbers it reports from them."""

from dataclasses import dataclass, field
from enum import Enum

from tandem_engine.base.recording import recording
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.messages.stats import SpeculationStats, StepFit

WEIGHT = 0.1
"""Weight of the newest measurement in the moving means."""

MIN_PREFILL = 32
"""Prompt tokens of a step from which on it tells something about the rate of prefill; fewer are lost in the rest."""

TYPICAL_PREFILL = 64
"""A step of this many prompt tokens has half the weight, a longer one more."""

MIN_SHARE = 0.25
"""Of a step's time that is put down to its tokens, however short it was."""


class Phase(Enum):
    """What the scheduler thread spends a turn on."""

    PLAN = "plan"
    LAUNCH = "launch"
    SETTLE = "settle"
    WAIT = "wait"
    """For the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerStats:
    """The scheduler's share of `messages.stats.EngineStats`, under the same names."""

    loop_count: int
    running: int
    waiting: int
    waiting_tokens: int
    oldest_wait_s: float
    prefill_tokens_per_s: float
    decode_step_s: float
    prompt_tokens_total: int
    cached_tokens_total: int
    output_tokens_total: int
    requests_total: int
    aborted_total: int
    failed_total: int
    """Ended by an error; refused ones are not counted here."""
    refused_total: int
    retracted_total: int
    preempted_total: int
    """Of the retracted: those put back for a more important request."""
    head_waits: str
    """Why the first waiting request was not admitted by the last plan (`Admission`); "" when no request waits."""
    swapped: int
    """Requests whose KV is in host memory now."""
    swapped_out_total: int
    swapped_in_total: int
    swap_misses_total: int
    """Swapped requests that were computed again, because a prefix they shared had left the cache."""
    host_cached_tokens_total: int
    """Of `cached_tokens_total`, those that were copied back from host memory."""
    disk_cached_tokens_total: int
    """And those that came from files."""
    unusable_tokens_total: int
    """Prompt tokens that the cache had and requests could not continue from."""
    engine_errors_total: int
    """Steps whose forward raised."""
    poison_requests_total: int
    """Requests ended because a step of theirs alone raised."""
    corrupted_requests_total: int
    """Requests ended because of NaN or infinite logits."""
    audit_failures_total: int
    overlap_hidden_s: float
    schedule_s: float
    plan_s: float
    launch_s: float
    settle_s: float
    wait_s: float
    paused: bool
    leaving: int = 0
    """Running requests that are to migrate."""
    speculation: SpeculationStats | None = None
    step_base_s: float = 0.0
    step_fit: StepFit | None = None
    step_fit_errors_total: int = 0


@dataclass(kw_only=True, slots=True)
class SpeculationTally:
    """Totals since start of what was drafted and what became of it."""

    runs: int = 0
    drafted: int = 0
    accepted: int = 0
    propose_s: float = 0.0
    accept_length: float = 0.0

    def count(self, *, drafted: int, accepted: int) -> None:
        """One request's run in a step."""
        self.runs += 1
        self.drafted += drafted
        self.accepted += accepted
        self.accept_length = _mean(self.accept_length, accepted + 1)

    def stats(self, proposer: str) -> SpeculationStats:
        return SpeculationStats(
            proposer=proposer,
            runs_total=self.runs,
            drafted_total=self.drafted,
            accepted_total=self.accepted,
            accept_length=self.accept_length,
            propose_s=self.propose_s,
        )


@dataclass(kw_only=True, slots=True)
class Tally:
    """Totals since start; durations in seconds."""

    loops: int = 0
    launched: int = 0
    settled: int = 0
    requests: int = 0
    refused: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    retracted: int = 0
    preempted: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    swap_misses: int = 0
    engine_errors: int = 0
    poison_requests: int = 0
    corrupted: int = 0
    audit_failures: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    host_cached_tokens: int = 0
    disk_cached_tokens: int = 0
    unusable_tokens: int = 0
    output_tokens: int = 0
    schedule_s: float = 0.0
    overlap_hidden_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    step_base_s: float = 0.0
    """What a step takes whatever it computes: the self-test's decode step; 0 without one."""
    spent_s: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))

    @property
    def moves(self) -> int:
        """Grows whenever the scheduler got something done."""
        return self.launched + self.settled + self.finished + self.retracted + self.swap_misses

    def count_end(self, finish: Finish) -> None:
        self.finished += 1
        self.aborted += finish.reason is FinishReason.ABORT
        self.failed += finish.reason is FinishReason.ERROR

    def spend(self, phase: Phase, seconds: float) -> None:
        """The scheduler thread was busy with `phase`, or waited, for so long."""
        self.spent_s[phase] += seconds

    def expect(self, prefill_tokens_per_s: float, decode_step_s: float) -> None:
        """Rates of a self-test: the first steps are compared with them."""
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.decode_step_s = self.step_base_s = decode_step_s

    @recording
    def measure_prefill(self, tokens: int, compute_s: float) -> None:
        """A step that computed prompt tokens alone. The rate is what each further token costs."""
        if compute_s > 0.0 and (tokens >= MIN_PREFILL or self.prefill_tokens_per_s == 0.0):
            computing = max(compute_s - self.step_base_s, MIN_SHARE * compute_s)
            weight = WEIGHT * tokens / (tokens + TYPICAL_PREFILL)
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, tokens / computing, weight)

    @recording
    def measure_decode(self, compute_s: float) -> None:
        """A step that computed one token for each of its requests."""
        if compute_s > 0.0:
            self.decode_step_s = _mean(self.decode_step_s, compute_s)


def _mean(mean: float, value: float, weight: float = WEIGHT) -> float:
    return value if mean == 0.0 else mean + weight * (value - mean)
