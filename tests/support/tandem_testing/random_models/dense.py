"""Draws of families without experts."""

from random import Random
from typing import Any

from tandem_testing.random_models.sizes import (
    CONTEXT,
    FULL,
    SLIDING,
    WINDOWS,
    decoder,
    head_size,
    kinds,
    partial,
    rotation,
    some,
    windows,
)
from tandem_testing.tiny_checkpoints import TinyModel


def llama(rng: Random) -> TinyModel:
    fields = decoder(rng) | some(rng, attention_bias=(True, False), mlp_bias=(True, False))
    return TinyModel(config_class="LlamaConfig", fields=fields | {"rope_parameters": rotation(rng)})


def mistral(rng: Random) -> TinyModel:
    fields = decoder(rng) | some(rng, sliding_window=(*WINDOWS, None))
    return TinyModel(config_class="MistralConfig", fields=fields | {"rope_parameters": rotation(rng)})


def _qwen(rng: Random, config_class: str, fields: dict[str, Any]) -> TinyModel:
    layers = fields["num_hidden_layers"]
    slides = rng.choice(
        (
            {},
            {"use_sliding_window": True, **some(rng, sliding_window=WINDOWS, max_window_layers=(0, 1, layers))},
            {"use_sliding_window": True, **windows(rng, layers)},
        )
    )
    return TinyModel(config_class=config_class, fields=fields | slides | {"rope_parameters": rotation(rng)})


def qwen2(rng: Random) -> TinyModel:
    return _qwen(rng, "Qwen2Config", decoder(rng, head_dim=None))


def qwen3(rng: Random) -> TinyModel:
    return _qwen(rng, "Qwen3Config", decoder(rng) | some(rng, attention_bias=(True, False)))


def _gemma(rng: Random) -> dict[str, Any]:
    fields = decoder(rng)
    fields |= windows(rng, fields["num_hidden_layers"])
    return fields | some(
        rng, query_pre_attn_scalar=(17, 24, 96), attention_bias=(True, False), final_logit_softcapping=(5.0, 30.0, None)
    )


def gemma2(rng: Random) -> TinyModel:
    fields = _gemma(rng) | some(rng, attn_logit_softcapping=(3.0, 50.0, None))
    return TinyModel(config_class="Gemma2Config", fields=fields | {"rope_parameters": rotation(rng)})


def gemma3(rng: Random) -> TinyModel:
    sets = {
        FULL: rotation(rng, exclude=("dynamic", "yarn")),
        SLIDING: {"rope_type": "default", "rope_theta": rng.choice((100.0, 10_000.0))},
    }
    fields = _gemma(rng) | {"rope_parameters": sets}
    if rng.random() < 0.4:
        del fields["layer_types"]
        fields |= some(rng, sliding_window_pattern=(2, 3, 6))
    return TinyModel(config_class="Gemma3TextConfig", fields=fields)


def gemma4(rng: Random) -> TinyModel:
    fields = decoder(rng)
    layers = fields["num_hidden_layers"]
    types = kinds(rng, layers, last=FULL)
    heads = fields["num_attention_heads"]
    divisors = [count for count in range(1, heads + 1) if heads % count == 0]
    wide = rng.choice((fields["head_dim"], 8, 20, 48, 80, 96))
    # transformers computes readers only where some of them have a window.
    shared = [n for n in range(1, layers) if set(types) == set(types[: layers - n]) and SLIDING in types[layers - n :]]
    readers = rng.choice([0, *shared])
    fields |= {
        "layer_types": types,
        "num_kv_shared_layers": readers,
        "global_head_dim": wide,
        "vocab_size_per_layer_input": fields["vocab_size"] + rng.choice((0, 5)),
        "rope_parameters": {
            FULL: {
                "rope_type": rng.choice(("proportional", "default")),
                "rope_theta": 1e6,
                "partial_rotary_factor": rng.choice((0.25, 0.5, 1.0)),
            },
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        },
        **some(
            rng,
            attention_k_eq_v=(True, False),
            num_global_key_value_heads=tuple(divisors),
            sliding_window=WINDOWS,
            hidden_size_per_layer_input=(0, 7, 12),
            final_logit_softcapping=(5.0, None),
            use_double_wide_mlp=(True, False),
            attention_bias=(True, False),
        ),
    }
    if rng.random() < 0.4:
        experts = rng.choice((3, 5))
        fields |= {
            "enable_moe_block": True,
            "num_experts": experts,
            "top_k_experts": rng.randint(1, experts),
            "moe_intermediate_size": rng.choice((24, 41)),
        }
    return TinyModel(config_class="Gemma4TextConfig", fields=fields)


def olmo2(rng: Random) -> TinyModel:
    fields = decoder(rng, head_dim=None) | some(rng, attention_bias=(True, False))
    return TinyModel(config_class="Olmo2Config", fields=fields | {"rope_parameters": rotation(rng)})


def olmo3(rng: Random) -> TinyModel:
    fields = decoder(rng, head_dim=None) | some(rng, attention_bias=(True, False))
    sets = {FULL: rotation(rng, exclude=("dynamic",)), SLIDING: {"rope_type": "default", "rope_theta": 500_000.0}}
    sets[FULL].pop("truncate", None)
    fields |= windows(rng, fields["num_hidden_layers"]) | {"rope_parameters": sets}
    return TinyModel(config_class="Olmo3Config", fields=fields)


def exaone4(rng: Random) -> TinyModel:
    fields = decoder(rng)
    layers = fields["num_hidden_layers"]
    pattern = rng.choice(
        (
            windows(rng, layers),
            {"sliding_window": None, "layer_types": [FULL] * layers},
            some(rng, sliding_window=WINDOWS, sliding_window_pattern=(2, 4)),
        )
    )
    return TinyModel(config_class="Exaone4Config", fields=fields | pattern | {"rope_parameters": rotation(rng)})


def glm4(rng: Random) -> TinyModel:
    fields = decoder(rng) | some(rng, attention_bias=(True, False))
    rope = {"rope_type": "default", "rope_theta": 10_000.0, **partial(rng, head_size(fields))}
    return TinyModel(config_class="Glm4Config", fields=fields | {"rope_parameters": rope})


def cohere2(rng: Random) -> TinyModel:
    fields = decoder(rng, head_dim=None) | some(rng, attention_bias=(True, False), logit_scale=(0.5, 0.0625))
    fields["layer_norm_eps"] = fields.pop("rms_norm_eps")
    pattern = some(rng, sliding_window=WINDOWS, sliding_window_pattern=(2, 4))
    fields |= rng.choice((windows(rng, fields["num_hidden_layers"]), pattern)) | {"rope_parameters": rotation(rng)}
    return TinyModel(config_class="Cohere2Config", fields=fields)


def phi3(rng: Random) -> TinyModel:
    fields = decoder(rng, head_dim=None) | some(rng, sliding_window=(*WINDOWS, None))
    size = head_size(fields)
    rope = {"rope_type": "default", "rope_theta": 10_000.0, **partial(rng, size)}
    # transformers wants as many factors as heads of hidden_size / heads would have, whatever `head_dim` says.
    if "head_dim" not in fields and rng.random() < 0.6:
        pairs = int(size * rope["partial_rotary_factor"]) // 2
        rope |= {
            "rope_type": "longrope",
            "factor": rng.choice((1.0, 4.0)),
            "short_factor": [1.0 + 0.1 * rng.random() * pair for pair in range(pairs)],
            "long_factor": [2.0 + pair for pair in range(pairs)],
            "original_max_position_embeddings": CONTEXT,
        }
        fields["original_max_position_embeddings"] = CONTEXT
    return TinyModel(config_class="Phi3Config", fields=fields | {"rope_parameters": rope})


def granite(rng: Random) -> TinyModel:
    fields = decoder(rng, head_dim=None) | some(
        rng,
        attention_bias=(True, False),
        mlp_bias=(True, False),
        logits_scaling=(1.0, 3.0),
        attention_multiplier=(0.05, 0.3),
        residual_multiplier=(0.22, 1.0),
        embedding_multiplier=(2.0, 12.0),
    )
    return TinyModel(config_class="GraniteConfig", fields=fields | {"rope_parameters": rotation(rng)})


def smollm3(rng: Random) -> TinyModel:
    fields = decoder(rng, head_dim=None) | some(rng, attention_bias=(True, False), mlp_bias=(True, False))
    layers = fields["num_hidden_layers"]
    slides = {"use_sliding_window": True, "sliding_window": rng.choice(WINDOWS)}
    fields |= rng.choice(({}, slides, slides | {"layer_types": kinds(rng, layers)}))
    still = rng.choice(({"no_rope_layers": [rng.randint(0, 1) for _ in range(layers)]}, {"no_rope_layer_interval": 2}))
    fields |= still | {"rope_parameters": rotation(rng)}
    return TinyModel(config_class="SmolLM3Config", fields=fields)


def seed_oss(rng: Random) -> TinyModel:
    fields = decoder(rng) | some(
        rng, attention_bias=(True, False), attention_out_bias=(True, False), mlp_bias=(True, False)
    )
    return TinyModel(config_class="SeedOssConfig", fields=fields | {"rope_parameters": rotation(rng)})


def ernie(rng: Random) -> TinyModel:
    return TinyModel(config_class="Ernie4_5Config", fields=decoder(rng) | {"rope_parameters": rotation(rng)})


def hunyuan_rotation(rng: Random) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": rng.choice((2.0, 50.0, 1000.0)), "factor": 1.0}
    return rotation(rng, exclude=("dynamic", "llama3"))


def hunyuan(rng: Random) -> TinyModel:
    fields = decoder(rng) | some(rng, attention_bias=(True, False)) | {"rope_parameters": hunyuan_rotation(rng)}
    return TinyModel(config_class="HunYuanDenseV1Config", fields=fields)


def ministral3(rng: Random) -> TinyModel:
    rope = rotation(rng, exclude=("default", "linear", "llama3", "dynamic"))
    rope |= {"llama_4_scaling_beta": rng.choice((0.1, 0.4))}
    fields = decoder(rng) | some(rng, sliding_window=(*WINDOWS, None)) | {"rope_parameters": rope}
    return TinyModel(config_class="Ministral3Config", fields=fields)
