"""Results for library callers: frozen, with vLLM's field names."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, kw_only=True, slots=True)
class Logprob:
    """One token at one position."""

    logprob: float
    rank: int | None
    """1 for the likeliest; None for a sampled token that is not among those asked for."""
    decoded_token: str


TokenScores: TypeAlias = dict[int, Logprob]
"""The token at one position and the likeliest there, by id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One output of one prompt."""

    index: int
    text: str
    """Without the stop string, unless asked for."""
    token_ids: tuple[int, ...]
    """With the token that ended it."""
    cumulative_logprob: float | None
    """Sum over `token_ids`; None when no logprobs were requested."""
    logprobs: tuple[TokenScores, ...] | None
    """Per token: the sampled one and the likeliest, by id."""
    finish_reason: str | None
    """stop, length, abort or error; None while it grows."""
    stop_reason: int | str | None
    """The stop string or stop id that ended it; None for EOS."""
    error: str | None = None
    """Why it ended early, when `finish_reason` is error."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestMetrics:
    """Durations in seconds. None before the first token."""

    queue_s: float | None
    """Until the first step."""
    prefill_s: float | None
    """From there to the first token."""
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """All outputs of one prompt."""

    request_id: str
    prompt: str | None
    """None when token ids were given."""
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenScores | None, ...] | None
    """Per prompt token, with the first output that has any; None for the first token, which nothing predicts."""
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingRequestOutput:
    """What `embed` gives for one prompt."""

    request_id: str
    prompt: str | None
    """None when token ids were given."""
    prompt_token_ids: tuple[int, ...]
    outputs: EmbeddingOutput
    finished: bool
