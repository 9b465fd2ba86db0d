"""Typed, bounded reads from a config object. Every error names the file, the field and its value.

Rotary parameters have two spellings. Since version 5 transformers writes one object, `rope_parameters`, with
`rope_theta` inside. Before, `rope_theta` was at the top and the scaling in `rope_scaling`, whose kind was called `type`
at first. As in transformers, a `rope_scaling` that is not empty wins when a file has both. Where kinds of layers rotate
differently, a family selects the object of each kind (`model.families`) and has `read_parameters` read it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypedDict

from tandem_engine.base.errors import CheckpointError, UnsupportedVariantError
from tandem_engine.config import ModelConfig, MoeConfig, RopeConfig
from tandem_engine.model.checkpoint_folder import ModelDirectory, read_json_object, shown


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFields:
    """One JSON object of a config file. Null means the same as absent, but for the `optional_` reads."""

    path: Path
    values: dict[str, object]
    prefix: str = ""
    """Where the object stands in the file, such as `rope_parameters.`."""

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, *, least: int, most: int, default: int | None = None) -> int:
        """An integer in [least, most]; without a default the field is required."""
        value = self._value(name, default)
        if type(value) is not int or not least <= value <= most:
            self.refuse(name, f"must be an integer from {least} to {most}")
        return value

    def number(self, name: str, *, least: float, most: float, default: float | None = None) -> float:
        """A number in [least, most]; without a default the field is required."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(name, "must be a number")
        if not least <= value <= most:
            self.refuse(name, f"must be from {least:g} to {most:g}")
        return float(value)

    def optional_integer(self, name: str, *, least: int, most: int, default: int | None) -> int | None:
        """As `integer`, but null means None and only an absent field means `default`."""
        if not self.has(name):
            return None if name in self.values else default
        return self.integer(name, least=least, most=most)

    def optional_number(self, name: str, *, least: float, most: float, default: float | None) -> float | None:
        """As `number`, but null means None and only an absent field means `default`."""
        if not self.has(name):
            return None if name in self.values else default
        return self.number(name, least=least, most=most)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "must be true or false")
        return value

    def choice(self, name: str, allowed: tuple[str, ...], *, default: str | None = None) -> str:
        """One of `allowed`; without a default the field is required."""
        value = self._value(name, default)
        if not isinstance(value, str) or value not in allowed:
            self.refuse(name, f"must be one of {', '.join(allowed)}")
        return value

    def items(self, name: str) -> list[object]:
        """A list; an absent field is an empty one, a single value a list of one."""
        value = self.values.get(name)
        if value is None:
            return []
        return value if isinstance(value, list) else [value]

    def inner(self, name: str) -> "ConfigFields":
        """The object under `name`; an absent one is empty."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            self.refuse(name, "must be an object")
        return ConfigFields(path=self.path, values=value, prefix=f"{self.prefix}{name}.")

    def refuse(self, name: str, rule: str) -> NoReturn:
        """Raise that field `name` breaks `rule`."""
        raise CheckpointError(f"{self.path}: {self.prefix}{name} {rule}, got {shown(self.values.get(name))}")

    def defer(self, name: str, rule: str) -> NoReturn:
        """As `refuse`, of a value that may well mean something to another implementation of the model."""
        raise UnsupportedVariantError(f"{self.path}: {self.prefix}{name} {rule}, got {shown(self.values.get(name))}")

    def _value(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.path}: {self.prefix}{name} is missing")
        return default


MAX_CONFIG = 1 << 20
"""Bytes of a config.json."""


def read_fields(directory: ModelDirectory) -> ConfigFields:
    """config.json, parsed and bounded in size. Raises `CheckpointError`."""
    path = directory.file("config.json")
    return ConfigFields(path=path, values=read_json_object(path, max_bytes=MAX_CONFIG))


ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")

ROPE_FIELDS = frozenset(
    {
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "finetuned",
        "high_freq_factor",
        "low_freq_factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_theta",
        "rope_type",
        "truncate",
        "type",
    }
)
"""What may stand in a set of rotary parameters. Which of them a kind reads follows below; it ignores the others, as in
transformers. Exporters wrote `finetuned` beside YaRN; it has no effect."""

ORIGINAL = "original_max_position_embeddings"
MAX_THETA = 1e12
MAX_FACTOR = 4096.0
MAX_POSITION = 1 << 24


class YarnFields(TypedDict, total=False):
    """Fields of `RopeConfig`."""

    beta_fast: float
    beta_slow: float
    attention_factor: float | None
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool


def read_rope(config: ConfigFields, *, max_position: int, theta: float = 10000.0, partial: bool = False) -> RopeConfig:
    """Parse the rotary parameters of a config whose `max_position_embeddings` is `max_position`.

    Args:
        theta: the base when the config names none.
        partial: whether only a part of each head may rotate.

    Raises:
        CheckpointError: unknown kind, a value out of bounds, or a variant that is not supported.
    """
    fields = rotary_fields(config)
    # A value at the top of the file wins, as in transformers (Phi-3 has it there).
    original = config if config.has(ORIGINAL) else fields
    base = fields if fields.has("rope_theta") else config
    if not partial:
        require_whole_rotation(config)
        require_whole_rotation(fields)
    return read_parameters(fields, original=original, base=base, max_position=max_position, theta=theta)


def rotary_fields(config: ConfigFields) -> ConfigFields:
    """The set of rotary parameters, of a config with one."""
    return config.inner("rope_scaling" if config.values.get("rope_scaling") else "rope_parameters")


def read_parameters(
    fields: ConfigFields, *, original: ConfigFields, base: ConfigFields, max_position: int, theta: float
) -> RopeConfig:
    """One set of rotary parameters.

    Args:
        original: where `original_max_position_embeddings` stands, if anywhere.
        base: where `rope_theta` stands, if anywhere.
        theta: what an absent `rope_theta` stands for.

    Raises:
        CheckpointError: as `read_rope`.
    """
    for name, value in fields.values.items():
        if name not in ROPE_FIELDS and value is not None:
            fields.defer(name, "is no rotary parameter that is known")
    spelling = "type" if fields.has("type") and not fields.has("rope_type") else "rope_type"
    if fields.has(spelling) and fields.values[spelling] not in ROPE_TYPES:
        fields.defer(spelling, f"must be one of {', '.join(ROPE_TYPES)}")
    rope_type = fields.choice(spelling, ROPE_TYPES, default="default")
    before = _original_position(original, rope_type=rope_type, max_position=max_position)
    if rope_type == "dynamic" and fields.has(ORIGINAL) and fields.values[ORIGINAL] != max_position:
        fields.defer(ORIGINAL, f"must be max_position_embeddings ({max_position}) for dynamic scaling")
    return RopeConfig(
        rope_type=rope_type,
        theta=base.number("rope_theta", least=1.001, most=MAX_THETA, default=theta),
        factor=_factor(fields, rope_type=rope_type, implied=max_position / before),
        original_max_position=None if rope_type in ("default", "linear") else before,
        low_freq_factor=_llama3_bound(fields, rope_type, "low_freq_factor", otherwise=1.0),
        high_freq_factor=_llama3_bound(fields, rope_type, "high_freq_factor", otherwise=4.0),
        **_yarn(fields, rope_type),
    )


def longest_context(rope: RopeConfig, *, max_position: int) -> int:
    """Positions that the scaling makes usable.

    `max_position_embeddings` of linear checkpoints is the length before scaling, and YaRN names its own; llama3
    checkpoints state the length after scaling. With dynamic scaling the context ends at `max_position_embeddings`:
    beyond it a token's angles depend, in transformers, on the longest sequence of its call, which shared pages cannot.
    """
    if rope.rope_type == "linear":
        return int(max_position * rope.factor)
    if rope.rope_type == "yarn" and rope.original_max_position is not None:
        return int(rope.original_max_position * rope.factor)
    return max_position


def require_whole_rotation(owner: ConfigFields) -> None:
    """Raise `UnsupportedVariantError` where only a part of each head rotates."""
    if owner.number("partial_rotary_factor", least=0, most=1, default=1.0) != 1.0:
        owner.defer("partial_rotary_factor", "must be 1; partial rotary embedding is not supported")


def _original_position(owner: ConfigFields, *, rope_type: str, max_position: int) -> int:
    """Context before scaling."""
    if rope_type not in ("llama3", "yarn"):
        return max_position
    return owner.integer(ORIGINAL, least=1, most=MAX_POSITION, default=max_position)


def _factor(fields: ConfigFields, *, rope_type: str, implied: float) -> float:
    if rope_type == "default":
        return 1.0
    default = implied if rope_type == "yarn" else None
    return fields.number("factor", least=1.0, most=MAX_FACTOR, default=default)


def _llama3_bound(fields: ConfigFields, rope_type: str, name: str, *, otherwise: float) -> float:
    """Required by llama3, which divides by it. Both bounds may be equal: then no wavelength lies between them."""
    if rope_type != "llama3":
        return otherwise
    value = fields.number(name, least=1e-3, most=1e6)
    if name == "high_freq_factor" and value < fields.number("low_freq_factor", least=1e-3, most=1e6):
        fields.refuse(name, "must be at least low_freq_factor")
    return value


def _yarn(fields: ConfigFields, rope_type: str) -> YarnFields:
    """What YaRN alone reads."""
    if rope_type != "yarn":
        return {}
    if "truncate" in fields.values and not fields.has("truncate"):
        fields.refuse("truncate", "must be true or false")  # transformers takes null for false
    return {
        "beta_fast": fields.number("beta_fast", least=1e-3, most=1e6, default=32.0),
        "beta_slow": fields.number("beta_slow", least=1e-3, most=1e6, default=1.0),
        "attention_factor": _optional(fields, "attention_factor"),
        "mscale": _optional(fields, "mscale"),
        "mscale_all_dim": _optional(fields, "mscale_all_dim"),
        "truncate": fields.flag("truncate", default=True),
    }


def _optional(fields: ConfigFields, name: str) -> float | None:
    return fields.number(name, least=0.0, most=1e6) if fields.has(name) else None


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
    eps_field: str = "rms_norm_eps"
    null_head_dim: bool = False
    """Whether a `head_dim` of null is hidden_size / num_attention_heads in spite of the default."""


def read_decoder(fields: ConfigFields, *, family: str, defaults: Defaults, partial: bool = False) -> ModelConfig:
    """A plain pre-norm SwiGLU decoder with one set of rotary parameters; families `replace` what they do otherwise.

    Args:
        partial: whether the family reads how much of each head rotates (`rotary_fields.read_partial_decoder`).

    Raises:
        CheckpointError: a field is missing, out of bounds, or not supported.
    """
    max_position = read_positions(fields)
    rope = read_rope(fields, max_position=max_position, theta=defaults.rope_theta, partial=partial)
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
        head_dim=_head_dim(fields, hidden_size, num_heads, defaults=defaults),
        max_position=context,
        rms_eps=fields.number(defaults.eps_field, least=1e-12, most=0.1, default=defaults.rms_eps),
        rope=rope,
        tie_embeddings=fields.flag("tie_word_embeddings", default=defaults.tie_embeddings),
        dtype=read_dtype(fields),
    )


MAX_SCALE = 1e6


def read_scale(fields: ConfigFields, name: str, *, default: float = 1.0) -> float:
    """A positive factor."""
    return fields.number(name, least=1 / MAX_SCALE, most=MAX_SCALE, default=default)


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


def _head_dim(fields: ConfigFields, hidden_size: int, num_heads: int, *, defaults: Defaults) -> int:
    default = None if defaults.null_head_dim and "head_dim" in fields.values else defaults.head_dim
    if not fields.has("head_dim") and default is None:
        if hidden_size % num_heads:
            fields.refuse("num_attention_heads", f"must divide hidden_size ({hidden_size}) without a head_dim")
        default = hidden_size // num_heads
    size = fields.integer("head_dim", least=4, most=MAX_HEAD_DIM, default=default)
    if size % 2 or size < 4:
        fields.refuse("head_dim", f"must be even and at least 4 for rotary positions, and is {size}")
    return size


MAX_EXPERTS = 4096
MAX_EXPERTS_PER_TOKEN = 256


def read_experts(
    fields: ConfigFields, *, count: str, size: str, chosen_field: str = "num_experts_per_tok"
) -> MoeConfig:
    """Experts whose number is in field `count` and whose width is in field `size`, weights normalized.

    Raises:
        CheckpointError: a number is missing or out of bounds, or a token would choose more than there are.
    """
    num_experts = fields.integer(count, least=1, most=MAX_EXPERTS)
    chosen = fields.integer(chosen_field, least=1, most=MAX_EXPERTS_PER_TOKEN)
    if chosen > num_experts:
        fields.refuse(chosen_field, f"must be at most {count} ({num_experts})")
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=chosen,
        intermediate_size=fields.integer(size, least=1, most=MAX_INTERMEDIATE),
        normalize=True,
    )


def expert_count(fields: ConfigFields, usual: str) -> str:
    """Name of the field with the number of experts: `usual`, or the other one of the two that transformers has.

    Raises:
        CheckpointError: the config has both, and they differ.
    """
    first, second = "num_local_experts", "num_experts"
    if fields.has(first) and fields.has(second) and fields.values[first] != fields.values[second]:
        fields.refuse(second, f"must be {first} ({shown(fields.values[first])}) where a file has both")
    return next((name for name in (first, second) if fields.has(name)), usual)


FULL, SLIDING = "full_attention", "sliding_attention"
