"""A checkpoint that transformers computes: what must be known before its weights are read.

transformers parses config.json here, without running code of the checkpoint. Its numbers are bounded as those of other
models are; `fallback` examines the actual attention once the model is built.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator

import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tandem_engine.base.errors import CheckpointError, EngineError
from tandem_engine.config import ModelConfig, ModelImpl, RopeConfig
from tandem_engine.model.checkpoint_folder import ModelDirectory
from tandem_engine.model.config_fields import (
    FULL,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_POSITION,
    MAX_VOCAB,
    SLIDING,
    ConfigFields,
    read_dtype,
)
from tandem_engine.model.known_fields import NO_EFFECT

SENTENCE_END = re.compile(r"(?<=[a-z)\]`'])\. ")

MAX_REASON = 400
"""Characters of an error of transformers that a message repeats."""


@contextlib.contextmanager
def refused_by_transformers(what: str) -> Iterator[None]:
    """Raise a `CheckpointError` that begins with `what` for whatever the block raises, except errors of ours."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        # Code of several hundred models meets a config.json of unknown origin here.
        raise CheckpointError(f"{what}: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """The first sentence of the error, short enough for a log."""
    text = SENTENCE_END.split(" ".join(str(error).split()))[0] or type(error).__name__
    if isinstance(error, KeyError | TypeError | AttributeError):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}…"


MAX_LABELS = 1 << 20
MAX_INTEGER = 1 << 31

LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")
"""Their angles depend on the longest sequence of a call, once that exceeds the original context."""

WITH_STATES = ("conv", "hybrid", "linear_attention", "mamba", "mlp", "moe")
"""Kinds of layers that keep states in the cache of transformers (`fallback_states`), or nothing."""

LONGROPE = "longrope"
"""Has two sets of angles; which one all requests have follows from the context length (`fallback`)."""

OWN_LONGROPE = ("phimoe",)
"""Models that scale more than their angles by the length of a call."""


def load_config(directory: ModelDirectory, fields: ConfigFields) -> PreTrainedConfig:
    """config.json as transformers understands it.

    Raises:
        CheckpointError: transformers does not know the model, or it is none that can be served through the
            attention interface; names the field.
    """
    model_type = fields.choice("model_type", tuple(CONFIG_MAPPING_NAMES)) if _is_known(fields) else None
    if model_type is None:
        _refuse_unknown(fields)
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        fields.refuse("model_type", "is no causal language model of transformers")
    _require_bounds(fields)
    with refused_by_transformers(f"{fields.path}: transformers cannot read it"):
        config = AutoConfig.from_pretrained(directory.path, local_files_only=True, trust_remote_code=False)
        _refuse_unsupported(config, fields)
    return config


def read_fallback_config(directory: ModelDirectory, fields: ConfigFields) -> ModelConfig:
    """The facts of `load_config` that an engine needs; end-of-sequence ids and fingerprint stay empty.

    Numbers of heads are a first guess: layers give the true ones when they run.
    """
    config = load_config(directory, fields)
    with refused_by_transformers(f"{fields.path}: it is not the config of a decoder with identical layers"):
        return _facts(config, fields)


def _facts(config: PreTrainedConfig, fields: ConfigFields) -> ModelConfig:
    known = ConfigFields(path=fields.path, values=_common_names(config))
    hidden_size = known.integer("hidden_size", least=1, most=MAX_HIDDEN)
    num_heads = known.integer("num_attention_heads", least=1, most=MAX_HEADS)
    default_head_dim = max(hidden_size // num_heads, 1)
    return ModelConfig(
        impl=ModelImpl.TRANSFORMERS,
        family=str(config.model_type),
        vocab_size=known.integer("vocab_size", least=1, most=MAX_VOCAB),
        hidden_size=hidden_size,
        intermediate_size=0,
        num_layers=known.integer("num_hidden_layers", least=1, most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=known.integer("num_key_value_heads", least=1, most=MAX_HEADS, default=num_heads),
        head_dim=known.integer("head_dim", least=1, most=MAX_HEAD_DIM, default=default_head_dim),
        max_position=_positions(known, config),
        rms_eps=0.0,
        rope=_rope(config),
        tie_embeddings=bool(config.tie_word_embeddings),
        dtype=read_dtype(fields),
    )


def fallback_fingerprint(weights: str, fields: ConfigFields) -> str:
    """`weights` together with all of config.json: our `ModelConfig` holds too little of what sets models apart."""
    text = json.dumps(fields.values, sort_keys=True)
    return hashlib.blake2b(f"{weights}\n{text}".encode(), digest_size=16).hexdigest()


def _is_known(fields: ConfigFields) -> bool:
    model_type = fields.values.get("model_type")
    return isinstance(model_type, str) and model_type in CONFIG_MAPPING_NAMES


def _refuse_unknown(fields: ConfigFields) -> None:
    if fields.has("auto_map"):
        fields.refuse(
            "auto_map", "names code in the checkpoint, which is never run; only models that transformers holds can be"
        )
    fields.refuse("model_type", f"is not known to transformers {transformers.__version__}; a newer one may know it")


def _require_bounds(fields: ConfigFields) -> None:
    """Numbers by which transformers would allocate before a config of it stands."""
    for name, value in fields.values.items():
        if type(value) is not int:
            continue
        if "layer" in name and value > MAX_LAYERS:
            fields.refuse(name, f"must be at most {MAX_LAYERS}")
        if (name == "num_labels" and value > MAX_LABELS) or (name not in NO_EFFECT and abs(value) > MAX_INTEGER):
            fields.refuse(name, "is out of bounds")


def _refuse_unsupported(config: PreTrainedConfig, fields: ConfigFields) -> None:
    if fields.has("quantization_config"):
        fields.refuse(
            "quantization_config",
            "is not supported where transformers computes the model",
        )
    if fields.values.get("is_causal", True) is not True:
        fields.refuse("is_causal", "must be true; tokens of a generating model see no later ones")
    if config.is_encoder_decoder:
        fields.refuse("is_encoder_decoder", "must be false; only decoders can be served")
    if config.get_text_config(decoder=True) is not config:
        fields.refuse("model_type", "takes more than text, which is not supported")
    _require_agreement(config, fields)
    kinds = fields.items("layer_types")
    if any(kind not in (FULL, SLIDING, *WITH_STATES) for kind in kinds):
        allowed = ", ".join((FULL, SLIDING, *WITH_STATES))
        fields.refuse("layer_types", f"may name only {allowed}; other layers have caches of their own")
    if getattr(config, "attention_chunk_size", None) is not None:
        fields.refuse("attention_chunk_size", "must be null; chunked attention is not supported")
    if getattr(config, "sliding_window", None) == 1:
        fields.refuse("sliding_window", "must be at least 2")


def _require_agreement(config: PreTrainedConfig, fields: ConfigFields) -> None:
    """transformers goes by `model_type`; `architectures` must not name a language model of another type.

    `config` may be of a further type, for transformers reads some files of one as those of another (Ministral).
    """
    named = {str(name) for name in fields.items("architectures")}
    known = {model_type: _names(value) for model_type, value in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    expected = known[str(fields.values["model_type"])] | known.get(config.model_type, set())
    if not named & expected and any(named & names for names in known.values()):
        fields.refuse("architectures", f"must name {min(expected)}, in accordance with model_type")


def _names(value: object) -> set[str]:
    return {value} if isinstance(value, str) else set(value)  # type: ignore[call-overload]


def _common_names(config: PreTrainedConfig) -> dict[str, object]:
    """Fields under their usual names, which transformers maps to those of the model (`n_embd` of GPT-2)."""
    names = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    )
    # A config is an open set of attributes, of which a model has the ones that mean something to it.
    return {name: getattr(config, name, None) for name in names}


def _positions(known: ConfigFields, config: PreTrainedConfig) -> int:
    """The longest context whose angles are a function of a token's own position, as shared pages need them."""
    positions = known.integer("max_position_embeddings", least=1, most=MAX_POSITION)
    for rope in _rope_sets(config):
        if rope.get("rope_type") in LENGTH_DEPENDENT_ROPES and _rope(config).rope_type != LONGROPE:
            fields = ConfigFields(path=known.path, values=rope, prefix="rope_parameters.")
            name = "original_max_position_embeddings"
            positions = min(positions, fields.integer(name, least=1, most=MAX_POSITION, default=positions))
    return positions


def _rope(config: PreTrainedConfig) -> RopeConfig:
    """Of a longrope whose angles can be set once for all requests; any other is the business of transformers."""
    sets = _rope_sets(config)
    original = sets[0].get("original_max_position_embeddings")
    nested = sets[0] is not getattr(config, "rope_parameters", None)
    if sets[0].get("rope_type") != LONGROPE or nested or config.model_type in OWN_LONGROPE or type(original) is not int:
        return RopeConfig()
    return RopeConfig(rope_type=LONGROPE, original_max_position=original)


def _rope_sets(config: PreTrainedConfig) -> list[dict[str, object]]:
    """One set of rotary parameters, or one per kind of layer, or none for models that do not rotate."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]
