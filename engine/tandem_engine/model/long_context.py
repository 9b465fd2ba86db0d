"""Models with two sets of rotary angles, for contexts up to a length and beyond it (`longrope`, Phi-3 and Phi-4-mini).

transformers takes the one or the other by the longest sequence of a call. A page is shared by calls, so here the
context length decides, as in vLLM: up to the original context all requests have the short angles, and each token is
that of transformers; with a longer `--context-length` all have the long ones, and that holds for prompts that are
longer than the original context. Workers with different angles never exchange KV.
"""

import hashlib
import logging

from tandem_engine.config import ModelConfig

LONGROPE = "longrope"

logger = logging.getLogger(__name__)


def has_long_angles(config: ModelConfig, context_length: int) -> bool:
    """Whether all requests of an engine with `context_length` have the angles of long contexts."""
    original = config.rope.original_max_position
    return config.rope.rope_type == LONGROPE and original is not None and context_length > original


def log_long_angles(original: int) -> None:
    """Warn that requests within the `original` context have other angles than in transformers."""
    logger.warning(
        "the context is longer than the original one, so all requests have the rotary angles of long contexts; "
        "prompts within the original context differ from transformers",
        extra={"fields": {"original_context": original}},
    )


def default_context(config: ModelConfig, limit: int) -> int:
    """Context of an engine without `--context-length`: at most `limit`, and one in which every request is exact."""
    exact = config.rope.original_max_position if config.rope.rope_type == LONGROPE else None
    return min(config.max_position, limit, exact or limit)


def fingerprint_of(config: ModelConfig, context_length: int) -> str:
    """`config.fingerprint`, and another one where an engine with `context_length` has long angles."""
    if not has_long_angles(config, context_length):
        return config.fingerprint
    return hashlib.blake2b(f"{config.fingerprint} long".encode(), digest_size=16).hexdigest()
