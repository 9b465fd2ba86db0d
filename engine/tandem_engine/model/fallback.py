"""A model of transformers with Tandem's paged attention; implements `CausalLM`.

load      weights by transformers, from safetensors alone; nothing missing, nothing left over
split     layers and head apart, because hidden states and logits are computed separately (`fallback_interface`)
states    layers that keep a state of each sequence have it in ours (`fallback_states`)
examine   attention goes through the interface, and what sequences leave is what we keep (`fallback_examination`)
run       all tokens of a step as one flat sequence, each with its own position
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import ModelConfig
from tandem_engine.model.adapters.step import StepAdapters
from tandem_engine.model.attention.backend import Attend, AttentionSpec
from tandem_engine.model.checkpoint_folder import ModelDirectory
from tandem_engine.model.config_fields import read_fields
from tandem_engine.model.fallback_config import load_config, refused_by_transformers
from tandem_engine.model.fallback_examination import examine
from tandem_engine.model.fallback_interface import ATTEND, NAME, Head, register
from tandem_engine.model.fallback_states import InOrder, Mixers, find_mixers
from tandem_engine.model.layers.delta import StatefulAttend
from tandem_engine.model.long_context import LONGROPE, has_long_angles, log_long_angles


@dataclass(frozen=True, kw_only=True, slots=True)
class FallbackModel:
    """Layers and head of a model of transformers."""

    config: ModelConfig
    attention: tuple[AttentionSpec, ...]
    body: PreTrainedModel
    head: Head
    mixers: Mixers | None = None
    """Of layers that keep states."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        wanted: Tensor,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """See `CausalLM.forward`."""
        assert adapters is None, "no adapter is loaded for a model that transformers computes"
        options: dict[str, object] = {ATTEND: attend, "use_cache": False}
        if self.mixers is not None:
            assert isinstance(attend, StatefulAttend), "a model with states runs where there are states"
            paged = InOrder(attend=attend.paged)
            options = {ATTEND: paged, "use_cache": True, **self.mixers.cache(attend.states)}
        out = self.body(input_ids=input_ids[None], position_ids=positions[None], **options)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden.index_select(0, wanted)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        return self.head(hidden)


PROBE = 12
"""Tokens by which layers with states are found."""


def load_fallback(
    directory: ModelDirectory,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    context_length: int,
    progress: bool,
) -> FallbackModel:
    """Load the weights in `directory` and examine the model. `config` is corrected by what is found.

    Args:
        context_length: positions that will be used at most.

    Raises:
        CheckpointError: weights do not fit the model, or it cannot be served through the attention interface.
    """
    register()
    hf_config = load_config(directory, read_fields(directory))
    model = _load(directory, hf_config, dtype, progress=progress).to(device).eval()
    with refused_by_transformers(f"{hf_config.model_type} cannot run with attention of ours"):
        body, head = Head.split(model)
        mixers = find_mixers(body, head, torch.arange(PROBE) % config.vocab_size)
        if mixers is not None:
            mixers.replace()
        found = examine(
            body,
            head,
            num_layers=config.num_layers,
            vocab_size=config.vocab_size,
            max_position=min(context_length, config.rope.original_max_position or context_length),
            mixers=mixers,
        )
        if has_long_angles(config, context_length):
            _set_long_angles(body, hf_config)
    _require_declared_window(hf_config, found.specs)
    facts = replace(
        config,
        num_heads=found.heads.queries,
        num_kv_heads=found.heads.keys,
        head_dim=found.heads.size,
        hidden_size=found.hidden_size,
        vocab_size=found.vocab_size,
        windows=tuple(spec.window for spec in found.specs),
        state_parts=() if mixers is None else mixers.parts,
        states_by_token=mixers is not None and mixers.stepwise[0],
        attention_layers=None if mixers is None else len(found.specs),
    )
    return FallbackModel(config=facts, attention=found.specs, body=body, head=head, mixers=mixers)


def _load(
    directory: ModelDirectory, hf_config: PreTrainedConfig, dtype: torch.dtype, *, progress: bool
) -> PreTrainedModel:
    if not progress:
        logging.disable_progress_bar()
    with refused_by_transformers(f"transformers cannot load {directory.path}"):
        model, report = AutoModelForCausalLM.from_pretrained(
            directory.path,
            config=hf_config,
            dtype=dtype,
            attn_implementation=NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(map(str, report[problem]))
        if names:
            raise CheckpointError(f"the weights in {directory.path} have {problem.replace('_', ' ')}: {names[0]}")
    if not _can_multiply_experts_at_once(model):
        model.set_experts_implementation("eager")
    return model


GROUPED_BYTES = 16
"""What rows are to be a multiple of where torch multiplies all experts of a layer at once."""


def _can_multiply_experts_at_once(model: PreTrainedModel) -> bool:
    stacked = (
        parameter
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[2] in ("gate_up_proj", "up_proj", "down_proj")
    )
    return not any(size * weight.element_size() % GROUPED_BYTES for weight in stacked for size in weight.shape[1:])


def _require_declared_window(hf_config: PreTrainedConfig, specs: tuple[AttentionSpec, ...]) -> None:
    """A window that only masks would apply, which we do not build, must not go unnoticed."""
    window = getattr(hf_config, "sliding_window", None)
    if not window or getattr(hf_config, "use_sliding_window", True) is False:
        return
    if all(spec.window is None for spec in specs):
        raise CheckpointError(
            f"sliding_window is {window}, but no layer passes it to the attention interface; "
            "remove it from config.json if the model has no window"
        )


def _set_long_angles(body: PreTrainedModel, config: PreTrainedConfig) -> None:
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
