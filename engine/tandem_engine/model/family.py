"""What tells one model family from another.

All supported families are the same decoder (see `model.decoder`): blocks of grouped-query attention with
rotary positions and a gated feed-forward part, each behind a norm. They differ in a few facts, so a family is
the reading of those facts from its config.json, and has a file of its own under `families`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tandem_engine.config import ModelConfig
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.known_fields import KnownFields


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A model family and how to read its config.json."""

    name: str
    """As in `model_type` of config.json."""
    architecture: str
    """As in `architectures` of config.json."""
    fields: KnownFields
    """Every field that `read` looks at, and what else may stand in the file."""
    read: Callable[[ConfigFields], ModelConfig]
    """Everything but the end-of-sequence ids and the fingerprint. Raises `CheckpointError`."""

    def parse(self, config: ConfigFields) -> ModelConfig:
        """As `read`, of a file in which every field is understood.

        Raises:
            UnsupportedVariantError: the file says something that the family does not do.
            CheckpointError: a field is missing or out of bounds.
        """
        for name, rule in self.fields.unknown(config):
            config.defer(name, rule)
        return self.read(config)
