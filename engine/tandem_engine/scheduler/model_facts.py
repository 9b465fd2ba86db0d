"""What the scheduler knows of the model: four facts, no architecture."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Limits that admission checks and tokens that end an output."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    context_length: int
    """Longest prompt + output of one request, in tokens."""
    hidden_size: int = 0
    """Size of embeddings; 0 when the model gives none."""
