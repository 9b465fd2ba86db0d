"""Settings of admission, batching, scheduling policy and preemption."""

import math
from dataclasses import dataclass
from enum import StrEnum

from tandem_engine.base.errors import ConfigError


class SchedulePolicy(StrEnum):
    """In which order waiting requests are admitted (docs/scheduling.md)."""

    FCFS = "fcfs"
    LPM = "lpm"
    DFS_WEIGHT = "dfs-weight"
    PRIORITY = "priority"
    SRF = "srf"

    @property
    def by_prefix(self) -> bool:
        """Whether it looks at the prefix cache."""
        return self in (SchedulePolicy.LPM, SchedulePolicy.DFS_WEIGHT)


class PreemptionMode(StrEnum):
    """What becomes of the KV of a request that is retracted."""

    AUTO = "auto"
    """Whichever is predicted to be cheaper, from measured rates."""
    RECOMPUTE = "recompute"
    SWAP = "swap"
    """Recomputed all the same where host memory has no room, or while its prompt is still being computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Admission, batching and retraction. Names follow SGLang and vLLM flags."""

    context_length: int = 2048
    """Longest prompt + output of one request, in tokens."""
    max_running_requests: int = 64
    max_queued_requests: int = 1024
    max_tokens_per_step: int = 0
    """Token budget that running requests, one token each, and prompts share; 0 is the sum of their own limits."""
    max_prefill_tokens: int = 2048
    """Token budget of the EXTEND part of one step."""
    mixed_prefill_tokens: int = 0
    """The same while others decode, whose next tokens wait for it; 0 is `max_prefill_tokens`."""
    shared_prefill_tokens: int = 64
    """Token budget of the EXTEND part of one step while several tenants have requests; 0 is no budget of its own."""
    chunked_prefill_size: int = 512
    """Longest run of prompt tokens one request may compute in one step."""
    long_prefill_token_threshold: int = 0
    """While others decode, a prompt with more tokens left than this computes only so many in a step; 0 is off."""
    schedule_policy: SchedulePolicy = SchedulePolicy.FCFS
    policy_ageing_seconds: float = 30.0
    """No request is overtaken without end: each policy defines what this wait is worth."""
    priority_preemption_threshold: int = 10
    """How much greater a waiting request's priority must be to put a running one back (policy priority)."""
    scheduler_delay_factor: float = 0.0
    """While others decode, new prompts wait until the oldest has waited so many times the last step with prompts."""
    watermark: float = 0.01
    """Share of the pool's pages that admission leaves free, so that requests just admitted can grow."""
    enable_mixed_chunk: bool = True
    """Let running decodes join a step that prefills."""
    enable_overlap: bool = True
    """Schedule step N+1 while step N computes."""
    init_new_token_ratio: float = 0.7
    """Share of a request's remaining output that admission reserves, at start and after a retraction."""
    min_new_token_ratio: float = 0.1
    new_token_ratio_decay_steps: int = 600
    max_sessions: int = 1024
    """Conversations kept at a time."""
    session_ttl: float = 600.0
    """Seconds that an unused conversation is kept."""
    max_retractions: int = 16
    """A request retracted more often than this fails instead of looping without end [retraction-bounded]."""
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    """Of retracted requests, if there is swap space at all."""
    force_retract_every: int = 0
    """Tests only: retract the newest running request every N decode steps. 0 is never."""
    force_fault_every: int = 0
    """Tests only: every N-th step with more than one sequence computes and then raises. 0 is never."""
    watchdog_timeout: float = 120.0
    """Seconds after which a step that has not come back is taken for hung."""
    audit_every_step: bool = False
    """Run the conservation audit after each step, not only when idle."""

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_admission()
        for flag, seconds in (
            ("--session-ttl", self.session_ttl),
            ("--policy-ageing-seconds", self.policy_ageing_seconds),
        ):
            if not 0.0 < seconds < math.inf:
                raise ConfigError(f"{flag} must be a number of seconds above 0, got {seconds:g}")
        if not self.watchdog_timeout > 0:
            raise ConfigError(f"--watchdog-timeout must be more than 0 seconds, got {self.watchdog_timeout}")

    def _check_counts(self) -> None:
        for flag, count in (
            ("--context-length", self.context_length),
            ("--max-running-requests", self.max_running_requests),
            ("--max-queued-requests", self.max_queued_requests),
            ("--max-sessions", self.max_sessions),
            ("--max-prefill-tokens", self.max_prefill_tokens),
            ("--chunked-prefill-size", self.chunked_prefill_size),
            ("--priority-preemption-threshold", self.priority_preemption_threshold),
        ):
            if count < 1:
                raise ConfigError(f"{flag} must be at least 1, got {count}")
        if self.mixed_prefill_tokens < 0:
            raise ConfigError(f"--mixed-prefill-tokens must be at least 0, got {self.mixed_prefill_tokens}")
        if self.shared_prefill_tokens < 0:
            raise ConfigError(f"--shared-prefill-tokens must be at least 0, got {self.shared_prefill_tokens}")
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                f"--long-prefill-token-threshold must be at least 0, got {self.long_prefill_token_threshold}"
            )

    def _check_admission(self) -> None:
        if 0 < self.max_tokens_per_step <= self.max_running_requests:
            raise ConfigError(
                f"--max-tokens-per-step {self.max_tokens_per_step} leaves no token for prompts with "
                f"--max-running-requests {self.max_running_requests}: raise it to at least "
                f"{self.max_running_requests + 1}"
            )
        if not 0.0 <= self.scheduler_delay_factor < math.inf:
            raise ConfigError(
                f"--scheduler-delay-factor must be a number of at least 0, got {self.scheduler_delay_factor:g}"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"--watermark must be at least 0 and below 1, got {self.watermark:g}")
        if not 0.0 < self.min_new_token_ratio <= self.init_new_token_ratio <= 1.0:
            raise ConfigError(
                "new token ratios must satisfy 0 < min <= init <= 1, got "
                f"min {self.min_new_token_ratio} and init {self.init_new_token_ratio}"
            )

    def prefill_budget(self, *, decodes: int) -> int:
        """Prompt tokens that fit in a step beside `decodes` tokens of running requests: always at least one."""
        whole = self.max_tokens_per_step or self.max_prefill_tokens + self.max_running_requests
        most = self.max_prefill_tokens
        if decodes and self.mixed_prefill_tokens:
            most = min(most, self.mixed_prefill_tokens)
        return min(most, max(1, whole - decodes))

    def chunk_limit(self, *, decodes: int) -> int:
        """Longest run of prompt tokens of one request in a step that `decodes` running requests take part in."""
        if not (decodes and self.long_prefill_token_threshold):
            return self.chunked_prefill_size
        return min(self.chunked_prefill_size, self.long_prefill_token_threshold)
