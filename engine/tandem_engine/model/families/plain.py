"""Llama, and Mistral, Qwen2 and Qwen3 without experts, which differ from it by windows, biases and norms on q and k."""

from dataclasses import replace

from tandem_engine.config import ModelConfig, QkNorm
from tandem_engine.model.config_fields import FULL, SLIDING, ConfigFields, Defaults, read_decoder
from tandem_engine.model.families.windows import (
    Windows,
    in_all_layers,
    in_sliding_layers,
    read_layer_kinds,
    read_window,
    require_uniform_layers,
    stated_window,
)
from tandem_engine.model.known_fields import BIASES, MLP_BIAS, SILU, Family, decoder_fields

DEFAULT_WINDOW = 4096


def _read_llama(fields: ConfigFields) -> ModelConfig:
    return replace(
        read_decoder(fields, family=LLAMA.name, defaults=Defaults()),
    )


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    fields=decoder_fields(SILU, BIASES, MLP_BIAS, no_effect=("max_window_layers",)),
    read=_read_llama,
)


def _read_mistral(fields: ConfigFields) -> ModelConfig:
    base = read_decoder(fields, family=MISTRAL.name, defaults=Defaults(num_kv_heads=8))
    window = read_window(fields, context=base.max_position, default=DEFAULT_WINDOW)
    require_uniform_layers(fields, num_layers=base.num_layers, default_window=DEFAULT_WINDOW)
    return replace(
        base,
        windows=in_all_layers(window, num_layers=base.num_layers),
    )


MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    fields=decoder_fields(SILU, "sliding_window", "layer_types", no_effect=("max_window_layers",)),
    read=_read_mistral,
)


def qwen_windows(fields: ConfigFields, *, num_layers: int, context: int) -> Windows:
    """Off unless `use_sliding_window`; then in the layers that `layer_types` names, or from `max_window_layers` on."""
    first = fields.integer("max_window_layers", least=0, most=1 << 20, default=28)
    slides = fields.flag("use_sliding_window", default=False) and stated_window(fields, default=4096) is not None
    default = tuple(SLIDING if slides and layer >= first else FULL for layer in range(num_layers))
    kinds = read_layer_kinds(fields, default=default)
    if not slides and SLIDING in kinds:
        fields.refuse("layer_types", f"may name {SLIDING} only with use_sliding_window and a sliding_window")
    return in_sliding_layers(fields, kinds, context=context, default=4096)


def _read_qwen2(fields: ConfigFields) -> ModelConfig:
    base = read_decoder(fields, family=QWEN2.name, defaults=Defaults(num_kv_heads=32))
    return replace(
        base,
        attention_bias=True,
        windows=qwen_windows(fields, num_layers=base.num_layers, context=base.max_position),
    )


QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=decoder_fields(SILU, "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    read=_read_qwen2,
)


def _read_qwen3(fields: ConfigFields) -> ModelConfig:
    base = read_decoder(fields, family=QWEN3.name, defaults=Defaults(head_dim=128, num_kv_heads=32))
    return replace(
        base,
        qk_norm=QkNorm.HEADS,
        windows=qwen_windows(fields, num_layers=base.num_layers, context=base.max_position),
    )


QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=decoder_fields(SILU, "use_sliding_window", "sliding_window", "max_window_layers", "layer_types", BIASES),
    read=_read_qwen3,
)
