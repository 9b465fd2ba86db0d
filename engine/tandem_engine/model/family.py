"""What tells one model family from another.

All supported families are the same decoder (see `model.decoder`): blocks of grouped-query attention with
rotary positions and a gated feed-forward part, each behind a norm. They differ in a few facts, so a family is
the reading of those facts from its config.json, and has a file of its own under `families`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tandem_engine.config import ModelConfig
from tandem_engine.model.config_fields import ConfigFields


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A model family and how to read its config.json."""

    name: str
    architecture: str
    """As in `architectures` of config.json."""
    read: Callable[[ConfigFields], ModelConfig]
    """Everything but the end-of-sequence ids and the fingerprint. Raises `CheckpointError`."""
