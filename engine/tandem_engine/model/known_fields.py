"""config.json as a closed world: a family names every field that it understands, and no other one is overlooked.

A field is one of

    implemented   the family's `read` looks at it
    no effect     nothing that serves reads it: training, defaults of generation, notes of exporters. Checked against
                  the model code of transformers, for `NO_EFFECT` against that of every family here
    one value     means something, and the family does what this value says: `is_causal` is true

A field that is none of these is unknown. `null` stands for an absent field, but for those of one value.

To add a field: put its name into the table of the family, or below if no family reads it. What many families read in
the same way is a `CommonField`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from tandem_engine.config import ModelConfig
from tandem_engine.model.config_fields import ConfigFields

IDENTITY = frozenset({"architectures", "model_type", "quantization_config", "eos_token_id"})
"""Read for every family: by the registry, the weight formats and the end-of-sequence ids."""

MXFP4_ARCHITECTURE = "GptOssForCausalLM"
"""Whose experts may be stored as MXFP4."""

TRAINING = frozenset(
    {
        "attention_dropout",
        "attn_pdrop",
        "classifier_dropout",
        "embd_pdrop",
        "gradient_checkpointing",
        "hidden_dropout",
        "hidden_dropout_prob",
        "initializer_range",
        "neftune_noise_alpha",
        "output_router_logits",
        "resid_pdrop",
        "router_aux_loss_coef",
        "router_jitter_noise",
    }
)

TOKENS = frozenset(
    {
        "bos_token_id",
        "cls_token_id",
        "decoder_start_token_id",
        "mask_token_id",
        "pad_token_id",
        "sep_token_id",
        "tokenizer_class",
        "unk_token_id",
    }
)

GENERATION = frozenset(
    {
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "bad_words_ids",
        "begin_suppress_tokens",
        "cache_implementation",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_p",
        "no_repeat_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "suppress_tokens",
        "target_lookbehind",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "use_cache",
    }
)
"""Defaults of transformers' `generate`; version 5 takes them out of config.json, and requests say what they want."""

NOTES = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_experts_implementation",
        "_flash_attn_2_enabled",
        "_name_or_path",
        "attn_implementation",
        "auto_map",
        "base_model_tp_plan",
        "chunk_size_feed_forward",
        "dual_chunk_attention_config",
        "experts_implementation",
        "finetuning_task",
        "id2label",
        "is_decoder",
        "is_llama_config",
        "label2id",
        "max_seq_len",
        "max_sequence_length",
        "model_max_length",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "pruned_heads",
        "return_dict",
        "seq_length",
        "task_specific_params",
        "tf_legacy_loss",
        "tie_last_hidden_states",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_return_dict",
    }
)
"""What says how a checkpoint came about or which kernels to take. `dual_chunk_attention_config` is for contexts beyond
`max_position_embeddings`, and transformers does not read it."""

NO_EFFECT = TRAINING | TOKENS | GENERATION | NOTES

ONE_VALUE: Mapping[str, tuple[object, ...]] = {
    "add_cross_attention": (False, None),
    "attention_bias": (False, None),
    "attention_chunk_size": (None,),
    "cross_attention_hidden_size": (None,),
    "is_causal": (True,),
    "is_encoder_decoder": (False, None),
    "layer_types": (None,),
    "mlp_bias": (False, None),
    "rope_interleaved": (False, None),
    "sliding_window": (None,),
    "tie_encoder_decoder": (False, None),
    "use_mrope": (False, None),
    "use_sliding_window": (False, None),
}
"""Of every family that does not implement the field."""

DECODER = frozenset(
    {
        "dtype",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "torch_dtype",
        "vocab_size",
    }
)
"""What `read_decoder` reads."""


@dataclass(frozen=True, slots=True)
class CommonField:
    """A field that many families read alike. A family names it among its fields, and its `read` passes over it."""

    name: str
    apply: Callable[[ConfigFields, ModelConfig], ModelConfig]
    """The config of a model with what the field says. Raises `CheckpointError`."""


def _silu(fields: ConfigFields, config: ModelConfig) -> ModelConfig:
    if fields.has("hidden_act") and fields.values["hidden_act"] != "silu":
        fields.defer("hidden_act", "must be silu")
    return config


def _mlp_bias(fields: ConfigFields, config: ModelConfig) -> ModelConfig:
    return replace(config, mlp_bias=fields.flag("mlp_bias", default=False))


def biases(*, default: bool, output: bool = True) -> CommonField:
    """`attention_bias`: on q, k and v, and on the `output` projection. An absent field means `default`."""

    def apply(fields: ConfigFields, config: ModelConfig) -> ModelConfig:
        stated = fields.flag("attention_bias", default=default)
        return replace(config, attention_bias=stated, output_bias=stated if output else config.output_bias)

    return CommonField("attention_bias", apply)


SILU = CommonField("hidden_act", _silu)
"""The gate of every family but Gemma."""
BIASES = biases(default=False)
MLP_BIAS = CommonField("mlp_bias", _mlp_bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownFields:
    """What a family understands of config.json, besides `IDENTITY`, `NO_EFFECT` and `ONE_VALUE`."""

    implemented: frozenset[str]
    common: tuple[CommonField, ...] = ()
    """Those of `implemented` that `Family.parse` reads."""
    no_effect: frozenset[str] = frozenset()
    one_value: Mapping[str, tuple[object, ...]] = field(default_factory=dict)

    def unknown(self, config: ConfigFields) -> Iterator[tuple[str, str]]:
        """Name of each field that is not understood, or not with its value, and the rule that it breaks."""
        read = self.implemented | IDENTITY
        for name, value in config.values.items():
            if name in read or name in self.no_effect:
                continue
            allowed = self.one_value.get(name, ONE_VALUE.get(name))
            if allowed is not None:
                if not _is_one_of(value, allowed):
                    yield name, f"must be {_listed(allowed)} in a model of this family"
            elif name not in NO_EFFECT and value is not None:
                yield name, "is a field that is not known to have no effect on a model of this family"


def decoder_fields(
    *names: str | CommonField,
    no_effect: tuple[str, ...] = (),
    one_value: Mapping[str, tuple[object, ...]] | None = None,
) -> KnownFields:
    """A family that reads `names` besides the fields of `read_decoder`."""
    return KnownFields(
        implemented=DECODER | {each if isinstance(each, str) else each.name for each in names},
        common=tuple(each for each in names if isinstance(each, CommonField)),
        no_effect=frozenset(no_effect),
        one_value=dict(one_value or {}),
    )


def _is_one_of(value: object, allowed: tuple[object, ...]) -> bool:
    """As JSON means it: 1 is not true."""
    return any(type(value) is type(choice) and value == choice for choice in allowed)


def _listed(allowed: tuple[object, ...]) -> str:
    return json.dumps(allowed[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A model family and how to read its config.json."""

    name: str
    """As in `model_type` of config.json."""
    architecture: str
    """As in `architectures` of config.json."""
    fields: KnownFields
    """Every field that is looked at, and what else may stand in the file."""
    read: Callable[[ConfigFields], ModelConfig]
    """Everything but common fields, the end-of-sequence ids and the fingerprint. Raises `CheckpointError`."""
    other_names: tuple[str, ...] = ()
    """Further values of `model_type` that mean this family."""

    def parse(self, config: ConfigFields) -> ModelConfig:
        """As `read`, of a file in which every field is understood.

        Raises:
            UnsupportedVariantError: the file says something that the family does not do.
            CheckpointError: a field is missing or out of bounds.
        """
        for name, rule in self.fields.unknown(config):
            config.defer(name, rule)
        model = self.read(config)
        for common in self.fields.common:
            model = common.apply(config, model)
        return model
