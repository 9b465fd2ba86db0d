"""An output matrix that a checkpoint stores although its config.json says that it is the embedding.

transformers shares the two only if they are equal, so a stored matrix that differs is the one to use. Older exporters
wrote copies; those are left out, as a shared matrix takes half the memory.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch

from tandem_engine.config import ModelConfig
from tandem_engine.model.safetensors_file import ReadableTensor
from tandem_engine.model.tensor_names import EMBEDDING, LM_HEAD

ROWS = 4096
"""Compared at a time."""

logger = logging.getLogger(__name__)


def with_stored_head(config: ModelConfig, tensors: Mapping[str, ReadableTensor]) -> ModelConfig:
    """`config`, with `tie_embeddings` off if the stored output matrix is not the embedding.

    Raises:
        CheckpointError: a file became unreadable since its header was checked.
    """
    head, table = tensors.get(LM_HEAD), tensors.get(EMBEDDING)
    if not config.tie_embeddings or head is None or table is None or _equal(head, table):
        return config
    logger.warning(
        "tie_word_embeddings is true, but the stored lm_head.weight is not the embedding; it is used as it is",
        extra={"fields": {"path": str(head.path)}},
    )
    return replace(config, tie_embeddings=False)


def _equal(head: ReadableTensor, table: ReadableTensor) -> bool:
    if head.shape != table.shape or not head.shape:
        return False
    starts = range(0, head.shape[0], ROWS)
    parts = ((start, min(start + ROWS, head.shape[0])) for start in starts)
    return all(_same_rows(head.read_part(0, *part), table.read_part(0, *part)) for part in parts)


def _same_rows(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool((first.float() == second.float()).all())
