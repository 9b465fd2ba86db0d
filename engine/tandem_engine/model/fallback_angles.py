"""The rotary modules of a `longrope` model, set to the angles of long contexts for good."""

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tandem_engine.base.errors import CheckpointError
from tandem_engine.model.long_context import LONGROPE, log_long_angles


def set_long_angles(body: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Have every call of `body` rotate as transformers does beyond the original context.

    Raises:
        CheckpointError: the model keeps its angles elsewhere.
    """
    original = config.rope_parameters["original_max_position_embeddings"]
    modules = [module for module in body.modules() if _is_rotary(module)]
    if not modules:
        raise CheckpointError(
            f"rotary angles of {config.model_type} cannot be set; pass --context-length {original} or less"
        )
    for module in modules:
        long, _ = ROPE_INIT_FUNCTIONS[LONGROPE](config, module.inv_freq.device, seq_len=original + 1)
        # transformers takes the first for short calls and the second for long ones.
        module.original_inv_freq = long
        module.long_inv_freq = long
        module.inv_freq = long.clone()
    log_long_angles(original)


def _is_rotary(module: nn.Module) -> bool:
    return getattr(module, "rope_type", None) == LONGROPE and hasattr(module, "original_inv_freq")
