"""From a model directory to a `ModelConfig`.

    config.json ─────────────▶ fields with bounds ─▶ family ─▶ ModelConfig ─▶ fingerprint
    generation_config.json ──▶ end-of-sequence ids ──────────────┘                ▲
    *.safetensors ───────────▶ headers, checked; samples of the data ─────────────┘

The files are parsed here, by our own code, with a bound on every number: nothing in a checkpoint is
executed, `auto_map` is ignored, and there is no switch that changes this.
"""

from dataclasses import replace
from pathlib import Path

from tandem_engine.config import ModelConfig
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.directory import ModelDirectory, open_directory
from tandem_engine.model.eos import read_eos
from tandem_engine.model.family import Family
from tandem_engine.model.fingerprint import fingerprint
from tandem_engine.model.json_file import read_json_object
from tandem_engine.model.registry import find_family
from tandem_engine.model.rope_fields import MAX_POSITION, longest_context, read_rope
from tandem_engine.model.shards import open_tensors
from tandem_engine.model.sliding_window import require_full_attention
from tandem_engine.model.tensor_names import require_tensors

MAX_CONFIG = 1 << 20
"""Bytes of a config.json."""
MAX_VOCAB = 1 << 22
MAX_HIDDEN = 1 << 17
MAX_INTERMEDIATE = 1 << 20
MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
DTYPES = ("float32", "bfloat16", "float16")


def read_model_config(path: str | Path) -> ModelConfig:
    """Read the model directory `path`: its config, and its weight files as far as identity needs it.

    Raises:
        CheckpointError: anything is absent, malformed, out of bounds, unsupported or inconsistent. The
            message names the file and the field or tensor.
    """
    directory = open_directory(path)
    config = parse_config(directory)
    tensors = open_tensors(directory)
    require_tensors(config, tensors, where=directory.path)
    return replace(config, fingerprint=fingerprint(config, tensors))


def parse_config(directory: ModelDirectory) -> ModelConfig:
    """The part of `read_model_config` that needs no weights; the fingerprint stays empty."""
    path = directory.file("config.json")
    fields = ConfigFields(path=path, values=read_json_object(path, max_bytes=MAX_CONFIG))
    family = find_family(fields)
    _refuse_unsupported(fields)
    config = _architecture(fields, family)
    if family.has_sliding_window:
        require_full_attention(fields, num_layers=config.num_layers, context=config.max_position)
    return replace(config, eos_token_ids=read_eos(directory, fields, vocab_size=config.vocab_size))


def _refuse_unsupported(fields: ConfigFields) -> None:
    fields.choice("hidden_act", ("silu",), default="silu")
    if fields.has("quantization_config"):
        fields.refuse("quantization_config", "is not supported; use a checkpoint that is not quantised")


def _architecture(fields: ConfigFields, family: Family) -> ModelConfig:
    traits = family.read_traits(fields)
    hidden_size = fields.integer("hidden_size", least=1, most=MAX_HIDDEN)
    num_heads = fields.integer("num_attention_heads", least=1, most=MAX_HEADS)
    max_position = fields.integer("max_position_embeddings", least=1, most=MAX_POSITION)
    rope = read_rope(fields, max_position=max_position)
    context = longest_context(rope, max_position=max_position)
    if context > MAX_POSITION:
        fields.refuse("max_position_embeddings", f"times the rope factor exceeds {MAX_POSITION} ({context})")
    return ModelConfig(
        family=family.name,
        vocab_size=fields.integer("vocab_size", least=1, most=MAX_VOCAB),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", least=1, most=MAX_INTERMEDIATE),
        num_layers=fields.integer("num_hidden_layers", least=1, most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, num_heads),
        head_dim=_head_dim(fields, hidden_size, num_heads, default=traits.head_dim),
        max_position=context,
        rms_eps=fields.number("rms_norm_eps", least=1e-12, most=0.1, default=1e-6),
        rope=rope,
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        attention_bias=traits.attention_bias,
        output_bias=traits.output_bias,
        mlp_bias=traits.mlp_bias,
        qk_norm=traits.qk_norm,
        dtype=_dtype(fields),
    )


def _num_kv_heads(fields: ConfigFields, num_heads: int) -> int:
    count = fields.integer("num_key_value_heads", least=1, most=MAX_HEADS, default=num_heads)
    if num_heads % count:
        fields.refuse("num_key_value_heads", f"must divide num_attention_heads ({num_heads})")
    return count


def _head_dim(fields: ConfigFields, hidden_size: int, num_heads: int, *, default: int | None) -> int:
    if not fields.has("head_dim") and default is None:
        if hidden_size % num_heads:
            fields.refuse("num_attention_heads", f"must divide hidden_size ({hidden_size}) without a head_dim")
        default = hidden_size // num_heads
    size = fields.integer("head_dim", least=4, most=MAX_HEAD_DIM, default=default)
    if size % 2 or size < 4:
        fields.refuse("head_dim", f"must be even and at least 4 for rotary positions, and is {size}")
    return size


def _dtype(fields: ConfigFields) -> str:
    """transformers writes `dtype` since version 5 and `torch_dtype` before; without either it is float32."""
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    return fields.choice(name, DTYPES, default="float32")
