"""The fields of config.json that all families share, each with a bound."""

from dataclasses import dataclass

from tandem_engine.config import Activation, ModelConfig, RopeConfig
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.rope_fields import MAX_POSITION, longest_context, read_rope

MAX_VOCAB = 1 << 22
MAX_HIDDEN = 1 << 17
MAX_INTERMEDIATE = 1 << 20
MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """What absent fields stand for in a family, as in its config class of transformers."""

    head_dim: int | None = None
    """None is hidden_size / num_attention_heads."""
    num_kv_heads: int | None = None
    """None is num_attention_heads."""
    rms_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_embeddings: bool = False


def read_decoder(fields: ConfigFields, *, family: str, defaults: Defaults) -> ModelConfig:
    """A plain pre-norm SwiGLU decoder with one set of rotary parameters; families `replace` what they do otherwise.

    Raises:
        CheckpointError: a field is missing, out of bounds, or not supported.
    """
    max_position = read_positions(fields)
    rope = read_rope(fields, max_position=max_position, theta=defaults.rope_theta)
    context = longest_context(rope, max_position=max_position)
    if context > MAX_POSITION:
        fields.refuse("max_position_embeddings", f"times the rope factor exceeds {MAX_POSITION} ({context})")
    return read_sizes(fields, family=family, defaults=defaults, rope=rope, context=context)


def read_positions(fields: ConfigFields) -> int:
    """`max_position_embeddings`."""
    return fields.integer("max_position_embeddings", least=1, most=MAX_POSITION)


def read_sizes(fields: ConfigFields, *, family: str, defaults: Defaults, rope: RopeConfig, context: int) -> ModelConfig:
    """As `read_decoder`, of a family that reads its rotary parameters `rope` and its longest `context` itself."""
    hidden_size = fields.integer("hidden_size", least=1, most=MAX_HIDDEN)
    num_heads = fields.integer("num_attention_heads", least=1, most=MAX_HEADS)
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size", least=1, most=MAX_VOCAB),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", least=1, most=MAX_INTERMEDIATE),
        num_layers=fields.integer("num_hidden_layers", least=1, most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, num_heads, absent=defaults.num_kv_heads),
        head_dim=_head_dim(fields, hidden_size, num_heads, default=defaults.head_dim),
        max_position=context,
        rms_eps=fields.number("rms_norm_eps", least=1e-12, most=0.1, default=defaults.rms_eps),
        rope=rope,
        tie_embeddings=fields.flag("tie_word_embeddings", default=defaults.tie_embeddings),
        dtype=read_dtype(fields),
    )


def require_silu(fields: ConfigFields) -> Activation:
    """The gate of every family but Gemma."""
    if fields.has("hidden_act") and fields.values["hidden_act"] != "silu":
        fields.defer("hidden_act", "must be silu")
    return Activation.SILU


def read_dtype(fields: ConfigFields) -> str:
    """transformers writes `dtype` since version 5 and `torch_dtype` before; without either it is float32."""
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    return fields.choice(name, DTYPES, default="float32")


def _num_kv_heads(fields: ConfigFields, num_heads: int, *, absent: int | None) -> int:
    """Null means as many as query heads in every family; absent may stand for a number."""
    default = num_heads if absent is None or "num_key_value_heads" in fields.values else absent
    count = fields.integer("num_key_value_heads", least=1, most=MAX_HEADS, default=default)
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
