"""Parameters and KV bytes of a model, from its config.json alone."""

from dataclasses import dataclass
from pathlib import Path

from tandem_engine.base.errors import CheckpointError, ConfigError
from tandem_engine.config.model import ModelConfig, MoeConfig
from tandem_engine.model.checkpoint_folder import open_directory
from tandem_engine.model.config_fields import read_fields
from tandem_engine.model.families.registry import require_family
from tandem_engine.model.families.text_towers import text_part

BITS = {"float32": 32, "bfloat16": 16, "float16": 16}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFigures:
    """What times and memory depend on."""

    name: str
    parameters: int
    """All that must be in memory."""
    active_parameters: int
    """Those that compute one token: less than all with experts."""
    layers: int
    heads: int
    """Query heads; a tensor-parallel size divides them."""
    kv_bytes: int
    """Of one token, all layers, at 16 bits or what the checkpoint declares."""
    weight_bits: float
    """Of a parameter, as the checkpoint declares its dtype."""
    context_length: int


def read_model_figures(path: Path) -> ModelFigures:
    """Of a checkpoint folder, or of a config.json.

    Raises:
        ConfigError: --model is neither, or has layers whose size this does not know.
        CheckpointError: config.json is damaged, or of a model that Tandem does not compute itself.
    """
    folder = path.parent if path.is_file() and path.name == "config.json" else path
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model {path}: no config.json there; give the checkpoint folder or its config.json")
    fields = text_part(read_fields(open_directory(folder)))
    try:
        config = require_family(fields).parse(fields)
    except CheckpointError as error:
        raise CheckpointError(f"--model {path}: {error}") from error
    return figures_of(config, name=folder.resolve().name)


def figures_of(config: ModelConfig, *, name: str) -> ModelFigures:
    """Raises `ConfigError` for attention over latents and layers with states: neither is sized by heads."""
    if config.latent is not None or config.has_states or config.varied is not None:
        raise ConfigError(
            f"--model {name}: its layers are not all plain attention, so no estimate is made from config.json; measure "
            "a worker (tandem ctl HOST:PORT rates --out r.json) and give --rates r.json"
        )
    hidden, head = config.hidden_size, config.head_dim
    attention = hidden * head * (2 * config.num_heads + 2 * config.num_kv_heads)
    dense, expert = 3 * hidden * config.intermediate_size, 0
    held = active = config.num_layers * attention
    moe = config.moe
    for layer in range(config.num_layers):
        if moe is None or layer in moe.dense_layers:
            held, active = held + dense, active + dense
        else:
            expert = 3 * hidden * moe.intermediate_size
            held += expert * moe.num_experts + _shared(moe, hidden) + hidden * moe.num_experts
            active += expert * moe.experts_per_token + _shared(moe, hidden) + hidden * moe.num_experts
    table = config.vocab_size * hidden
    bits = BITS.get(config.dtype, 16)
    return ModelFigures(
        name=name,
        parameters=held + table * (1 if config.tie_embeddings else 2),
        active_parameters=active + table,
        layers=config.num_layers,
        heads=config.num_heads,
        kv_bytes=2 * config.num_layers * config.num_kv_heads * head * min(bits, 16) // 8,
        weight_bits=bits,
        context_length=config.max_position,
    )


def _shared(moe: MoeConfig, hidden: int) -> int:
    """Parameters of experts that compute every token."""
    return 0 if moe.shared is None else 3 * hidden * moe.shared.intermediate_size
