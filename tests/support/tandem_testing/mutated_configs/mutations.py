"""Changes of a config.json, one field at a time: values of every type for each field that is there, and fields that are
not there with values that mean something to some model.

The list of a config is always the same, so a mutation is named by its checkpoint and its number. Pairs of mutations are
drawn from it by a seed.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

ABSENT = "<absent>"
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """Fields of config.json that get another value; `ABSENT` takes them out."""

    changes: Mapping[str, Any]

    def of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        values = {**copy.deepcopy(dict(config)), **copy.deepcopy(dict(self.changes))}
        return {name: value for name, value in values.items() if not (isinstance(value, str) and value == ABSENT)}

    def __str__(self) -> str:
        return json.dumps(self.changes)[:200]


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, **more}


LLAMA3 = _rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=32)
LONG = _rope(
    "longrope",
    short_factor=[1.0 + 0.1 * i for i in range(8)],
    long_factor=[2.0 + 0.5 * i for i in range(8)],
    original_max_position_embeddings=32,
)
SETS: tuple[dict[str, Any], ...] = (
    {},
    {"rope_theta": 300.0},
    _rope("default", rope_theta=300.0),
    _rope("linear", factor=4.0),
    _rope("linear", factor=4.0, rope_theta=300.0),
    _rope("linear", factor=0.5),
    _rope("linear"),
    _rope("dynamic", factor=2.0),
    _rope("dynamic", factor=2.0, original_max_position_embeddings=32),
    LLAMA3,
    {**LLAMA3, "low_freq_factor": 4.0},
    YARN,
    {**YARN, "rope_theta": 300.0, "truncate": False},
    {**YARN, "truncate": None},
    {**YARN, "attention_factor": 0.5},
    {**YARN, "factor": None},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    {**YARN, "beta_fast": 8, "beta_slow": 2},
    {**YARN, "original_max_position_embeddings": ABSENT},
    LONG,
    _rope("default", partial_rotary_factor=0.5),
    _rope("linear", factor=2.0, partial_rotary_factor=0.5),
    _rope("proportional", factor=2.0),
    _rope("mrope", mrope_section=[2, 3, 3]),
    _rope("default", mrope_section=[2, 3, 3]),
    {"type": "linear", "factor": 4.0},
    {"type": "linear", "rope_type": "default", "factor": 4.0},
    {"type": "default", "rope_type": "linear", "factor": 4.0},
    {"factor": 4.0},
    _rope("nonsense"),
)
"""Rotary parameters, for either spelling."""


def _sets() -> Iterator[dict[str, Any]]:
    for values in SETS:
        plain = {name: value for name, value in values.items() if value != ABSENT}
        yield {"rope_scaling": plain, "rope_parameters": ABSENT}
        yield {"rope_scaling": plain, "rope_parameters": ABSENT, "rope_theta": 700.0}
        yield {"rope_scaling": plain}
        yield {"rope_parameters": plain}
        yield {"rope_parameters": plain, "rope_theta": 700.0}
        yield {"rope_parameters": {FULL: plain, SLIDING: {"rope_type": "default"}}}
        yield {"rope_parameters": {FULL: {"rope_type": "default"}, SLIDING: plain}}
        yield {"rope_parameters": plain, "original_max_position_embeddings": 48}
    nested = {FULL: LLAMA3, SLIDING: {"rope_theta": 50.0}}
    yield {"rope_parameters": {FULL: None, SLIDING: {"rope_theta": 50.0}}}
    yield {"rope_parameters": {FULL: {"rope_theta": 50.0}}}
    yield {"rope_parameters": {SLIDING: {"rope_theta": 50.0}}}
    yield {"rope_parameters": nested, "original_max_position_embeddings": 16}
    yield {"rope_parameters": {**nested, "rope_theta": 99.0}}
    yield {"rope_parameters": nested, "rope_theta": 99.0, "rope_local_base_freq": 77.0}
    yield {"rope_parameters": nested, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    yield {"rope_parameters": ABSENT, "rope_theta": 99.0, "rope_local_base_freq": 77.0}
    yield {"rope_parameters": ABSENT, "rope_scaling": None, "rope_theta": 99.0, "partial_rotary_factor": 0.5}


EXTRA: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (True, False),
    "attention_bias": (True, False),
    "attention_chunk_size": (8,),
    "attention_dropout": (0.5,),
    "attention_multiplier": (0.1,),
    "attention_temperature": (2.0,),
    "attn_logit_softcapping": (1.0, None, 0),
    "chunk_size_feed_forward": (4,),
    "clip_qkv": (0.5,),
    "decoder_sparse_step": (2, 0),
    "embedding_multiplier": (3.0,),
    "final_logit_softcapping": (1.0, None),
    "head_dim": (8, 32, None, 0),
    "hidden_act": ("gelu", "relu", "silu", "gelu_pytorch_tanh", "nonsense"),
    "hidden_activation": ("gelu", "silu", None),
    "is_causal": (False, None, True, 0),
    "is_decoder": (False, True),
    "is_encoder_decoder": (True,),
    "layer_types": (
        [FULL] * 3,
        [SLIDING] * 3,
        [FULL, SLIDING, FULL],
        [SLIDING, FULL, SLIDING],
        [FULL] * 2,
        ["attention"] * 3,
        ["linear_attention"] * 3,
        [],
        None,
    ),
    "logit_scale": (0.5,),
    "logits_scaling": (3.0,),
    "max_window_layers": (0, 1, 3),
    "mlp_bias": (True,),
    "mlp_layer_types": (["sparse"] * 3,),
    "mlp_only_layers": ([0], [0, 2], [7], None),
    "no_rope_layers": ([0, 1, 0],),
    "norm_topk_prob": (True, False),
    "num_experts": (4, 5, 6),
    "num_experts_per_tok": (1, 3),
    "num_local_experts": (4, 5, 6),
    "original_max_position_embeddings": (16,),
    "output_attentions": (True,),
    "output_router_logits": (True,),
    "partial_rotary_factor": (0.5, 1.0),
    "per_layer_config": ({"0": {"sliding_window": 8}},),
    "pretraining_tp": (2,),
    "qk_norm": (True,),
    "query_pre_attn_scalar": (64, 100, 256),
    "residual_multiplier": (0.3,),
    "rms_norm_eps": (ABSENT, 0.01, 1e-5, 0.5),
    "rope_interleaved": (True,),
    "rope_local_base_freq": (50.0,),
    "rope_theta": (700.0,),
    "router_jitter_noise": (0.5,),
    "sliding_window": (8, 1, 4096, None, ABSENT),
    "sliding_window_pattern": (2, 3),
    "tie_word_embeddings": (True, False, ABSENT),
    "torch_dtype": ("float16", "bfloat16", "float64"),
    "use_bidirectional_attention": (True, False, None),
    "use_cache": (False,),
    "use_qk_norm": (True,),
    "use_sliding_window": (True, False),
    "some_new_field": (1, "a", [1], None),
    "vision_config": ({"hidden_size": 8},),
    "text_config": ({"hidden_size": 8},),
}
PAIRS: tuple[dict[str, Any], ...] = (
    {"use_sliding_window": True, "sliding_window": 8},
    {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": ABSENT},
    {"use_sliding_window": True, "sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING]},
    {"use_sliding_window": True, "sliding_window": None, "layer_types": [SLIDING, FULL, SLIDING]},
    {"use_sliding_window": False, "sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING]},
    {"sliding_window": 8, "layer_types": [FULL] * 3},
    {"sliding_window": None, "layer_types": [FULL] * 3},
    {"sliding_window": 8, "layer_types": [SLIDING] * 3},
    {"sliding_window": 8, "layer_types": ABSENT},
    {"layer_types": ABSENT, "sliding_window_pattern": 2},
    {"dtype": ABSENT, "torch_dtype": "bfloat16"},
    {"dtype": ABSENT},
    {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
)
MODELS = (
    ("llama", "LlamaForCausalLM"),
    ("mistral", "MistralForCausalLM"),
    ("mixtral", "MixtralForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("qwen3_moe", "Qwen3MoeForCausalLM"),
    ("gemma2", "Gemma2ForCausalLM"),
    ("gemma3_text", "Gemma3ForCausalLM"),
    ("olmo2", "Olmo2ForCausalLM"),
    ("roberta", "RobertaForCausalLM"),
    ("gemma4_text", "Gemma4ForCausalLM"),
    (None, None),
    (ABSENT, ABSENT),
    (7, 7),
    ("", []),
)


def mutations(config: Mapping[str, Any]) -> list[Mutation]:
    """All of them for `config`, those that change nothing left out."""
    found = {str(mutation): mutation for mutation in map(_mutation, _changes(config))}
    return [mutation for mutation in found.values() if mutation.of(config) != config]


def drawn_pairs(config: Mapping[str, Any], seed: int, count: int) -> list[Mutation]:
    """Two changes at once that some model might mean, `count` times; every second pair has rotary parameters.

    A pair follows from `config`, `seed` and its number alone.
    """
    fields, rotary = [*_near(config), *_of_other_models()], [*_sets()]
    pairs = []
    for number in range(count):
        dice = Random(f"{seed} {number}")
        first, second = dice.sample(fields, 2)
        pairs.append(_mutation({**first, **(dice.choice(rotary) if number % 2 else second)}))
    return pairs


def _mutation(changes: Mapping[str, Any]) -> Mutation:
    return Mutation(changes=changes)


def _changes(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, value in config.items():
        for other in _others(value):
            yield {name: other}
    yield from _of_other_models()
    for model_type, architecture in MODELS:
        yield {"model_type": model_type}
        yield {"architectures": [architecture] if architecture not in (ABSENT, None, []) else architecture}
        yield {"model_type": model_type, "architectures": [architecture]}
    yield from _sets()


def _of_other_models() -> Iterator[dict[str, Any]]:
    for name, values in EXTRA.items():
        for value in values:
            yield {name: value}
    yield from PAIRS


def _near(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Numbers near those of `config`."""
    for name, value in config.items():
        if isinstance(value, int) and not isinstance(value, bool):
            yield from ({name: value + 1}, {name: value * 2}, {name: max(value // 2, 1)})
        elif isinstance(value, float):
            yield from ({name: value * 10}, {name: value / 10})


def _others(value: Any) -> Iterator[Any]:
    """Values that a field might have instead of `value`."""
    yield from (ABSENT, None, "nonsense", [], {}, [value], -1, 0, True)
    match value:
        case bool():
            yield not value
        case int():
            yield from (value + 1, value * 2, max(value // 2, 1), 1 << 40, 1 << 70, float(value), value + 0.5)
        case float():
            yield from (value * 10, value / 10, 1e300, -value, 5)
        case str():
            yield from (value.upper(), value + "x", "")
        case [first, *rest]:
            yield from (value[::-1], rest, [*value, first], [None] * len(value), [{}])
        case dict():
            for name, inner in value.items():
                for other in (ABSENT, *_others(inner)):
                    yield {key: kept for key, kept in {**value, name: other}.items() if _is_there(kept)}


def _is_there(value: Any) -> bool:
    return not (isinstance(value, str) and value == ABSENT)
