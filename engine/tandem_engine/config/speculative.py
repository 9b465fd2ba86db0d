"""Speculative decoding."""

from dataclasses import dataclass
from enum import StrEnum

from tandem_engine.base.errors import ConfigError

MAX_DRAFT_TOKENS = 15
"""With the token before them, what the paged attention kernel takes as one run (`MAX_CHAIN`)."""

MAX_LOOKUP_TOKENS = 32


class SpecAlgorithm(StrEnum):
    """The method that proposes drafts."""

    NGRAM = "NGRAM"
    """What followed the last tokens when they occurred before."""
    DRAFT = "DRAFT"
    """A smaller model of the same vocabulary."""
    EAGLE = "EAGLE"
    """A head of one layer over the model's own hidden states."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecConfig:
    """Speculative decoding. Names follow SGLang and vLLM flags."""

    algorithm: SpecAlgorithm | None = None
    """None decodes one token per step."""
    draft_model_path: str = ""
    """Checkpoint folder of the draft model or head."""
    num_draft_tokens: int = 4
    """Drafts that a request takes in one step at most."""
    prompt_lookup_min: int = 2
    """Tokens that must repeat before n-gram lookup proposes."""
    prompt_lookup_max: int = 4
    """Tokens of context by which n-gram lookup chooses between repetitions."""
    disable_by_batch_size: int = 0
    """No drafts in steps with more running requests than this: they are busy enough. 0 is no bound."""
    adaptive: bool = True
    """Fit each request's draft length to its acceptance, none at all included."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError(
                f"--speculative-num-draft-tokens must be between 1 and {MAX_DRAFT_TOKENS}, got {self.num_draft_tokens}"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max <= MAX_LOOKUP_TOKENS:
            raise ConfigError(
                "--ngram-prompt-lookup-min and -max must satisfy "
                f"1 <= min <= max <= {MAX_LOOKUP_TOKENS}, got {self.prompt_lookup_min} and {self.prompt_lookup_max}"
            )
        if self.needs_draft_model and not self.draft_model_path:
            raise ConfigError(
                f"--speculative-algorithm {self.algorithm} needs --speculative-draft-model-path, "
                "the folder of the draft's weights"
            )
        if self.draft_model_path and not self.needs_draft_model:
            raise ConfigError(
                "--speculative-draft-model-path has a use with --speculative-algorithm "
                f"{SpecAlgorithm.DRAFT} or {SpecAlgorithm.EAGLE} alone, which is {self.algorithm or 'not given'}"
            )

    @property
    def needs_draft_model(self) -> bool:
        return self.algorithm in (SpecAlgorithm.DRAFT, SpecAlgorithm.EAGLE)
