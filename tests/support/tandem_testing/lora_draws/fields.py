"""Fields of PEFT's `LoraConfig` with values that are not their defaults, fixed ones and drawn ones."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

PATTERNS = ("q_proj", "layers.1.self_attn.v_proj", "self_attn.o_proj", "model.layers.0.self_attn.k_proj")
REGEXES = (r"^model\.layers\.0\..*", r".*\.(q|k)_proj", r"layers\.[01]\.self_attn\.q_proj")
INITIAL = (False, "gaussian", "orthogonal", "eva", "olora", "pissa", "pissa_niter_2")

FIELDS: Mapping[str, tuple[Any, ...]] = {
    "task_type": ("CAUSAL_LM",),
    "auto_mapping": ({"base_model_class": "X", "parent_library": "y"},),
    "peft_version": ("0.0.1",),
    "base_model_name_or_path": ("somewhere/else",),
    "revision": ("main",),
    "inference_mode": (True,),
    "r": (1, 3, 5, 16),
    "target_modules": ("all-linear", r".*\.layers\.1\..*(q|v)_proj", ["q_proj"], ["k_proj", "o_proj"], ["lm_head"]),
    "exclude_modules": (["q_proj"], r".*\.layers\.0\..*"),
    "lora_alpha": (1, 3, 16, -4, 2.5),
    "lora_dropout": (0.1,),
    "fan_in_fan_out": (True,),
    "bias": ("all", "lora_only"),
    "use_rslora": (True,),
    "modules_to_save": (["norm"], ["lm_head"]),
    "init_lora_weights": INITIAL,
    "layers_to_transform": ([1], 0),
    "layers_pattern": ("layers", ["layers"]),
    "rank_pattern": ({PATTERNS[0]: 2}, {PATTERNS[1]: 7, PATTERNS[0]: 3}, {PATTERNS[3]: 1}, {REGEXES[1]: 2}),
    "alpha_pattern": ({PATTERNS[0]: 5}, {PATTERNS[2]: -3}, {PATTERNS[1]: 1.5}, {REGEXES[0]: 4}, {REGEXES[2]: 9}),
    "megatron_config": ({"a": 1},),
    "megatron_core": ("megatron.other",),
    "trainable_token_indices": ([0, 3], {"embed_tokens": [1]}),
    "loftq_config": ({"loftq_bits": 4},),
    "eva_config": ({"rho": 1.0},),
    "corda_config": ({"corda_method": "kpm"},),
    "lora_ga_config": ({"direction": "ArB2r"},),
    "use_dora": (True,),
    "velora_config": ({"rank": 2},),
    "alora_invocation_tokens": ([1, 2],),
    "use_qalora": (True,),
    "qalora_group_size": (8,),
    "monteclora_config": ({"num_samples": 2},),
    "layer_replication": ([[0, 2], [1, 2]],),
    "runtime_config": ({"ephemeral_gpu_offload": False},),
    "lora_bias": (True,),
    "target_parameters": (["mlp.experts.gate_up_proj"], ["mlp.up_proj.weight"]),
    "use_bdlora": ({"nblocks": 2},),
    "arrow_config": ({"top_k": 2},),
    "kasa_config": ({"beta": 0.1},),
    "ensure_weight_tying": (True,),
}
"""Of each field, values that are not its default."""

NEEDED: Mapping[str, Mapping[str, Any]] = {"layers_pattern": {"layers_to_transform": [1]}}
"""What PEFT requires with a field."""

ONLY_SAVED = frozenset(
    {
        "arrow_config",
        "auto_mapping",
        "corda_config",
        "eva_config",
        "kasa_config",
        "loftq_config",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "monteclora_config",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "use_bdlora",
        "use_qalora",
        "velora_config",
    }
)
"""Fields that are written to the saved config alone: PEFT needs other libraries, data or layers for them, or replaces
what they say."""

MAY_BE_REFUSED = frozenset(
    {
        "alora_invocation_tokens",
        "arrow_config",
        "bias",
        "init_lora_weights",
        "kasa_config",
        "layer_replication",
        "lora_bias",
        "modules_to_save",
        "monteclora_config",
        "target_parameters",
        "trainable_token_indices",
        "use_bdlora",
        "use_dora",
        "use_qalora",
        "velora_config",
    }
)
"""Fields that the engine does not support with some value; documented in docs/adapters.md."""


MAX_CHANGED = 5
LAYERS = 2
"""That patterns may name; every base has as many."""

UNSUPPORTED_TARGETS = ("embed_tokens", "lm_head")
"""PEFT has adapters for them, the engine has none."""


def drawn_fields(dice: random.Random, modules: Sequence[str]) -> dict[str, Any]:
    """A few fields of an adapter of a base that has `modules`."""
    names = dice.sample(sorted(FIELDS), dice.randint(1, MAX_CHANGED))
    return {name: _drawn(name, dice, modules) for name in names}


def _drawn(name: str, dice: random.Random, modules: Sequence[str]) -> Any:
    draw = DRAWN.get(name)
    return dice.choice(FIELDS[name]) if draw is None or dice.random() < 0.3 else draw(dice, modules)


def _targets(dice: random.Random, modules: Sequence[str]) -> list[str]:
    """Any of the base's projections, some of them in one layer; seldom one that the engine does not support."""
    chosen = dice.sample([*modules], dice.randint(1, len(modules)))
    named = [
        f"layers.{dice.randrange(LAYERS)}.{_parent(name)}{name}" if dice.random() < 0.2 else name for name in chosen
    ]
    return named + ([dice.choice(UNSUPPORTED_TARGETS)] if dice.random() < 0.1 else [])


def _pattern(value: Callable[[random.Random], Any]) -> Callable[[random.Random, Sequence[str]], dict[str, Any]]:
    """One to four ends of modules' names."""

    def draw(dice: random.Random, modules: Sequence[str]) -> dict[str, Any]:
        chosen = dice.choices([*modules], k=dice.randint(1, 4))
        ends = [
            dice.choice((name, f"{_parent(name)}{name}", f"layers.{dice.randrange(LAYERS)}.{_parent(name)}{name}"))
            for name in chosen
        ]
        return {end: value(dice) for end in ends}

    return draw


def _parent(name: str) -> str:
    """Of a projection, in every family."""
    if name.startswith("in_") or name == "out_proj":
        return "linear_attn."
    return "mlp." if name in ("gate_proj", "up_proj", "down_proj") else "self_attn."


def _rank(dice: random.Random) -> int:
    return dice.randint(1, 20)


def _alpha(dice: random.Random) -> float:
    return dice.choice((dice.randint(1, 32), dice.uniform(-16, 16)))


DRAWN: Mapping[str, Callable[[random.Random, Sequence[str]], Any]] = {
    "r": lambda dice, _: _rank(dice),
    "lora_alpha": lambda dice, _: _alpha(dice),
    "target_modules": _targets,
    "rank_pattern": _pattern(_rank),
    "alpha_pattern": _pattern(_alpha),
    "layers_to_transform": lambda dice, _: dice.sample(range(LAYERS), dice.randint(1, LAYERS)),
}
"""How other values are drawn."""
