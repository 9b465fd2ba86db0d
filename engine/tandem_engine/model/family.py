"""What tells one model family from another.

All supported families are the same decoder (see `model.decoder`): pre-norm blocks, grouped-query
attention with rotary positions, SwiGLU. They differ in a few facts, so a family is the reading of those
facts from its config.json, and has a file of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tandem_engine.model.config_fields import ConfigFields


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """The facts. The fields mean what those of `ModelConfig` mean."""

    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    """What an absent `head_dim` stands for; None is hidden_size / num_attention_heads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A model family and how to read its config.json."""

    name: str
    architecture: str
    """As in `architectures` of config.json."""
    read_traits: Callable[[ConfigFields], Traits]
    has_sliding_window: bool = False
    """Whether the config can ask for sliding-window attention in some layers."""
