"""`adapter_config.json` of PEFT as a closed world: each field is read, has no effect here, or is refused by name.

    read        the fields below, which determine what a pair of matrices A and B adds
    no effect   `NO_EFFECT`: training, initialization, and which modules were trained, which the tensors show as well
    refused     `REFUSED` with a value that is not neutral, and unknown fields that are neither null, false nor empty

    y = W x + s · B (A x)      s = alpha / r, with rank-stabilized LoRA alpha / √r, both of the module itself

PEFT applies the keys of `rank_pattern` and `alpha_pattern` as regular expressions, `(.*\\.)?(key)$`, of which the first
that matches a module counts. Here a key is a dotted suffix of a module's name. Other regular expressions would be
untrusted code that runs in the engine.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tandem_engine.base.errors import CheckpointError
from tandem_engine.model.checkpoint_folder import read_json_object, shown
from tandem_engine.model.config_fields import ConfigFields

MAX_BYTES = 1 << 20
MAX_RANK = 1 << 16
MAX_ALPHA = 1e9
DEFAULT = 8
"""PEFT's, of both `r` and `lora_alpha`."""

NO_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""`fan_in_fan_out` is about base weights that are stored transposed; A and B never are."""

REFUSED = {
    "alora_invocation_tokens": "activated LoRA is not supported",
    "arrow_config": "a mixture of adapters is not supported",
    "kasa_config": "KaSA is not supported",
    "layer_replication": "a model with repeated layers is not supported",
    "lora_bias": "biases of adapters are not supported; train with lora_bias=False",
    "modules_to_save": "fully trained modules are not supported; leave them out of the adapter",
    "monteclora_config": "MonteCLoRA is not supported",
    "target_parameters": "adapters of parameters, such as stacked experts, are not supported",
    "trainable_token_indices": "trained tokens are not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "use_dora": "DoRA is not supported; merge the adapter into its base",
    "use_qalora": "QALoRA is not supported",
    "velora_config": "VeLoRA is not supported",
}

READ = frozenset(
    {
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "use_rslora",
    }
)

KEEPS_BASE = (None, True, False, "gaussian", "orthogonal", "eva")
"""`init_lora_weights` that leave the base model as it is. The others subtract from its weights what A and B begin with,
so that an adapter that was not converted after training means nothing next to the original base."""

_SUFFIX = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftFacts:
    """The fields of an adapter's config that determine what its matrices add."""

    path: Path
    rank: int
    alpha: float
    rank_stabilized: bool
    rank_pattern: dict[str, int]
    """By dotted suffix, in the order of the file."""
    alpha_pattern: dict[str, float]
    target_modules: tuple[str, ...]
    """Dotted suffixes of modules that the adapter is for; () where the config has a rule instead of a list."""
    excluded: tuple[str, ...] | None
    """Dotted suffixes of modules that it is not for all the same; None where the config has a rule instead."""
    layers: tuple[int, ...] | None
    """That the adapter is for; None for all."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Parse the file `path`. Raises `CheckpointError` naming the field."""
        fields = ConfigFields(path=path, values=read_json_object(path, max_bytes=MAX_BYTES))
        _require_lora(fields)
        _require_known(fields)
        return cls(
            path=path,
            rank=fields.integer("r", least=1, most=MAX_RANK, default=DEFAULT),
            alpha=fields.number("lora_alpha", least=-MAX_ALPHA, most=MAX_ALPHA, default=DEFAULT),
            rank_stabilized=fields.flag("use_rslora", default=False),
            rank_pattern=_ranks(fields),
            alpha_pattern=_alphas(fields),
            target_modules=_names(fields, "target_modules") or (),
            excluded=_names(fields, "exclude_modules"),
            layers=_layers(fields),
        )

    def excludes(self, target: str) -> bool:
        """Whether the adapter may have nothing of a module that `target_modules` lists."""
        if self.excluded is None:
            return True
        return any(ends_with(name, target) or ends_with(target, name) for name in self.excluded)

    def rank_of(self, module: str) -> int:
        """Of the module with this dotted name."""
        key = _first(self.rank_pattern, module)
        return self.rank if key is None else self.rank_pattern[key]

    def scale_of(self, module: str) -> float:
        """s of the module with this dotted name."""
        key, rank = _first(self.alpha_pattern, module), self.rank_of(module)
        alpha = self.alpha if key is None else self.alpha_pattern[key]
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank


def ends_with(module: str, suffix: str) -> bool:
    """Whether `suffix` is the end of a dotted name, by whole parts."""
    return module == suffix or module.endswith(f".{suffix}")


def _first(pattern: dict[str, int] | dict[str, float], module: str) -> str | None:
    """The first key that `module` ends with. A pattern may have far more keys than a name has ends."""
    parts = module.split(".")
    found = [end for start in range(len(parts)) if (end := ".".join(parts[start:])) in pattern]
    if len(found) < 2:
        return found[0] if found else None
    return next(key for key in pattern if key in found)


def _require_lora(fields: ConfigFields) -> None:
    fields.choice("peft_type", ("LORA",))
    fields.choice("bias", ("none",), default="none")
    value = fields.values.get("init_lora_weights")
    # 1 == True: only the values themselves.
    if not any(value is kept or (isinstance(value, str) and value == kept) for kept in KEEPS_BASE):
        fields.refuse(
            "init_lora_weights",
            "must be true, false, gaussian, orthogonal or eva: others change the base model; save the adapter with "
            "path_initial_model_for_weight_conversion",
        )


def _require_known(fields: ConfigFields) -> None:
    for name, value in fields.values.items():
        if name in READ or name in NO_EFFECT or value is None or value is False or value in ("", [], {}):
            continue
        if name in REFUSED:
            fields.refuse(name, f"must be absent: {REFUSED[name]}")
        raise CheckpointError(f"{fields.path}: field {shown(name)} is unknown, got {shown(value)}; remove it")


def _ranks(fields: ConfigFields) -> dict[str, int]:
    pattern = fields.inner("rank_pattern")
    return {_suffix(pattern, key): pattern.integer(key, least=1, most=MAX_RANK) for key in pattern.values}


def _alphas(fields: ConfigFields) -> dict[str, float]:
    pattern = fields.inner("alpha_pattern")
    return {_suffix(pattern, key): pattern.number(key, least=-MAX_ALPHA, most=MAX_ALPHA) for key in pattern.values}


def _suffix(pattern: ConfigFields, key: str) -> str:
    if not _SUFFIX.fullmatch(key):
        raise CheckpointError(
            f"{pattern.path}: {pattern.prefix.rstrip('.')} has the key {shown(key)}; only the end of a module's dotted "
            "name is supported, such as layers.1.self_attn.q_proj, and no other regular expression"
        )
    return key


def _layers(fields: ConfigFields) -> tuple[int, ...] | None:
    """PEFT reads an empty list as all layers."""
    value = fields.values.get("layers_to_transform")
    given = value if isinstance(value, list) else [] if value is None else [value]
    layers = tuple(layer for layer in given if isinstance(layer, int) and not isinstance(layer, bool))
    if len(layers) < len(given):
        fields.refuse("layers_to_transform", "must be the number of a layer, or a list of them")
    return layers or None


def _names(fields: ConfigFields, name: str) -> tuple[str, ...] | None:
    """None for a rule in one string. It is never evaluated: the tensors show what it matched."""
    value = fields.values.get(name)
    if isinstance(value, str):
        return None
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        fields.refuse(name, "must be a list of names, or one string")
    return tuple(str(item) for item in value)
