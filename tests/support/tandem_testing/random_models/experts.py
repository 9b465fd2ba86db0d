"""Draws of families whose layers choose experts, latents and states included."""

from math import lcm
from random import Random
from typing import Any

from tandem_testing.random_models.dense import hunyuan_rotation
from tandem_testing.random_models.sizes import (
    FULL,
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


def _count(rng: Random, count: str, chosen: str, *, most: int = 7) -> dict[str, int]:
    experts = rng.randint(2, most)
    return {count: experts, chosen: rng.randint(1, min(experts, 4))}


def _groups(rng: Random) -> dict[str, int]:
    """Experts in groups of at least two, of which enough are kept."""
    size, groups = rng.choice((2, 3, 4)), rng.choice((1, 2, 4))
    kept = rng.randint(1, groups)
    return {
        "n_routed_experts": size * groups,
        "n_group": groups,
        "topk_group": kept,
        "num_experts_per_tok": rng.randint(1, min(size * kept, 4)),
    }


def mixtral(rng: Random) -> TinyModel:
    fields = decoder(rng) | _count(rng, "num_local_experts", "num_experts_per_tok")
    fields |= some(rng, sliding_window=(*WINDOWS, None)) | {"rope_parameters": rotation(rng)}
    return TinyModel(config_class="MixtralConfig", fields=fields)


def _sparse_layers(rng: Random, layers: int) -> dict[str, Any]:
    return rng.choice(({}, {"mlp_only_layers": [rng.randrange(layers)]}, {"decoder_sparse_step": 2}))


def qwen3_moe(rng: Random) -> TinyModel:
    fields = decoder(rng) | _count(rng, "num_experts", "num_experts_per_tok")
    fields |= _sparse_layers(rng, fields["num_hidden_layers"])
    fields |= some(rng, norm_topk_prob=(True, False), moe_intermediate_size=(24, 41), attention_bias=(True, False))
    fields |= rng.choice(({}, {"use_sliding_window": True, "sliding_window": rng.choice(WINDOWS)}))
    return TinyModel(config_class="Qwen3MoeConfig", fields=fields | {"rope_parameters": rotation(rng)})


def qwen2_moe(rng: Random) -> TinyModel:
    fields = decoder(rng, head_dim=None) | _count(rng, "num_experts", "num_experts_per_tok")
    layers = fields["num_hidden_layers"]
    fields |= _sparse_layers(rng, layers)
    fields |= some(
        rng,
        norm_topk_prob=(True, False),
        moe_intermediate_size=(24, 41),
        shared_expert_intermediate_size=(17, 40),
        qkv_bias=(True, False),
    )
    fields |= rng.choice(({}, {"use_sliding_window": True, "max_window_layers": layers, **windows(rng, layers)}))
    return TinyModel(config_class="Qwen2MoeConfig", fields=fields | {"rope_parameters": rotation(rng)})


def glm4_moe(rng: Random) -> TinyModel:
    fields = decoder(rng) | _groups(rng)
    rope = {"rope_type": "default", "rope_theta": 10_000.0, **partial(rng, head_size(fields))}
    fields |= some(
        rng,
        attention_bias=(True, False),
        use_qk_norm=(True, False),
        moe_intermediate_size=(24, 41),
        n_shared_experts=(1, 2),
        routed_scaling_factor=(1.0, 1.7),
        norm_topk_prob=(True, False),
        first_k_dense_replace=(0, 1, 3),
    )
    return TinyModel(config_class="Glm4MoeConfig", fields=fields | {"rope_parameters": rope})


def ernie_moe(rng: Random) -> TinyModel:
    fields = decoder(rng, head_dim=None) | _count(rng, "moe_num_experts", "moe_k")
    fields |= some(
        rng,
        moe_intermediate_size=(24, 41),
        moe_num_shared_experts=(0, 1, 2),
        moe_layer_start_index=(0, 1),
        moe_layer_interval=(1, 2),
        moe_layer_end_index=(-1, 1),
        moe_norm_min=(1e-12, 0.3),
    )
    return TinyModel(config_class="Ernie4_5_MoeConfig", fields=fields | {"rope_parameters": rotation(rng)})


def hunyuan_moe(rng: Random) -> TinyModel:
    fields = decoder(rng) | _count(rng, "num_experts", "moe_topk") | some(rng, attention_bias=(True, False))
    return TinyModel(config_class="HunYuanMoEV1Config", fields=fields | {"rope_parameters": hunyuan_rotation(rng)})


def minimax_m2(rng: Random) -> TinyModel:
    fields = decoder(rng) | _count(rng, "num_local_experts", "num_experts_per_tok")
    rope = {"rope_type": "default", "rope_theta": 5e6, **partial(rng, head_size(fields))}
    return TinyModel(config_class="MiniMaxM2Config", fields=fields | {"rope_parameters": rope})


def gpt_oss(rng: Random) -> TinyModel:
    fields = decoder(rng) | _count(rng, "num_local_experts", "num_experts_per_tok")
    fields |= windows(rng, fields["num_hidden_layers"]) if rng.random() < 0.7 else some(rng, sliding_window=WINDOWS)
    fields |= some(rng, swiglu_limit=(0.5, 1.5, 7.0), attention_bias=(True, False))
    fields |= {"rope_parameters": rotation(rng)} | some(rng, swiglu_alpha=(1.702, 0.9))
    if rng.random() < 0.6:
        # Whole blocks of 32 inputs, so that experts can be MXFP4.
        fields |= {"hidden_size": lcm(32, fields["num_attention_heads"])} | some(rng, intermediate_size=(32, 64, 96))
    return TinyModel(config_class="GptOssConfig", fields=fields)


def llama4(rng: Random) -> TinyModel:
    fields = decoder(rng) | some(
        rng,
        attention_chunk_size=(2, 5, 16, 24, 100, 4096),
        floor_scale=(1, 16, 100),
        attn_scale=(0.1, 0.3),
        attn_temperature_tuning=(True, False),
        intermediate_size_mlp=(41, 72),
        use_qk_norm=(True, False),
        attention_bias=(True, False),
        interleave_moe_layer_step=(1, 2),
    )
    fields |= _count(rng, "num_local_experts", "num_experts_per_tok")
    layers = fields["num_hidden_layers"]
    fields |= rng.choice(
        (
            {"no_rope_layers": [rng.randint(0, 1) for _ in range(layers - 1)] + [1]},
            some(rng, no_rope_layer_interval=(2, 3)),
        )
    )
    fields |= rng.choice(({}, {"moe_layers": [rng.randrange(layers)]}))
    fields["rope_parameters"] = rotation(rng, exclude=("dynamic", "yarn"))
    if rng.random() < 0.3:
        fields["layer_types"] = kinds(rng, layers, first="chunked_attention")
    return TinyModel(config_class="Llama4TextConfig", fields=fields)


def _latent(rng: Random) -> dict[str, Any]:
    heads = rng.choice((1, 3, 4, 6))
    fields = decoder(rng, head_dim=False, num_attention_heads=heads, num_key_value_heads=heads)
    fields |= {"hidden_size": rng.choice((36, 60, 72))} | _groups(rng)
    return fields | some(
        rng,
        kv_lora_rank=(7, 16, 24, 40),
        q_lora_rank=(None, 9, 32),
        qk_nope_head_dim=(5, 20, 48),
        qk_rope_head_dim=(4, 6, 16, 40),
        v_head_dim=(3, 12, 40),
        moe_intermediate_size=(24, 41),
        n_shared_experts=(1, 2),
        routed_scaling_factor=(1.0, 2.5),
        attention_bias=(True, False),
    )


def deepseek_v2(rng: Random) -> TinyModel:
    fields = _latent(rng) | some(rng, topk_method=("greedy", "group_limited_greedy"), first_k_dense_replace=(0, 1, 3))
    # transformers rotates by complex numbers, which begin at even places.
    fields |= some(rng, kv_lora_rank=(8, 16, 24, 40), qk_nope_head_dim=(6, 20, 48))
    return TinyModel(config_class="DeepseekV2Config", fields=fields | {"rope_parameters": rotation(rng)})


def deepseek_v3(rng: Random) -> TinyModel:
    fields = _latent(rng) | some(
        rng, first_k_dense_replace=(0, 1, 3), norm_topk_prob=(True, False), rope_interleave=(True, False)
    )
    return TinyModel(config_class="DeepseekV3Config", fields=fields | {"rope_parameters": rotation(rng)})


def glm4_moe_lite(rng: Random) -> TinyModel:
    fields = _latent(rng) | some(rng, norm_topk_prob=(True, False), rope_interleave=(True, False))
    fields["mlp_layer_types"] = kinds(rng, fields["num_hidden_layers"], first="dense", second="sparse")
    return TinyModel(config_class="Glm4MoeLiteConfig", fields=fields | {"rope_parameters": rotation(rng)})


def delta(rng: Random, **more: Any) -> dict[str, Any]:
    """Layers with states of Qwen3-Next and Qwen3.5. Weights and norms as in the tiny checkpoints."""
    keys, ratio = rng.choice((1, 2, 3, 4)), rng.choice((1, 2, 3))
    fields = decoder(rng, even=4, initializer_range=0.1, rms_norm_eps=3e-2)
    layers = rng.choice((1, 2, 4, 5))
    fields |= some(
        rng,
        linear_conv_kernel_dim=(2, 3, 4),
        linear_key_head_dim=(8, 12, 40),
        linear_value_head_dim=(6, 20, 48),
        attention_bias=(True, False),
    )
    types = kinds(rng, layers, first="linear_attention")
    types[rng.randrange(layers)] = FULL
    pattern: dict[str, Any] = {"layer_types": types}
    if layers > 1 and rng.random() < 1 / 3:
        pattern = {"full_attention_interval": rng.choice([every for every in (2, 4) if every <= layers])}
    rope = {"rope_type": "default", "rope_theta": 1e6, **partial(rng, head_size(fields))}
    return (
        fields
        | {"num_hidden_layers": layers, "rope_parameters": rope}
        | pattern
        | {"linear_num_key_heads": keys, "linear_num_value_heads": keys * ratio}
        | more
    )


def _shared_experts(rng: Random) -> dict[str, Any]:
    return _count(rng, "num_experts", "num_experts_per_tok") | some(
        rng, moe_intermediate_size=(24, 41), shared_expert_intermediate_size=(17, 40)
    )


def qwen3_next(rng: Random) -> TinyModel:
    fields = delta(rng) | _shared_experts(rng) | some(rng, norm_topk_prob=(True, False))
    fields |= _sparse_layers(rng, fields["num_hidden_layers"])
    return TinyModel(config_class="Qwen3NextConfig", fields=fields)


def qwen3_5(rng: Random) -> TinyModel:
    return TinyModel(config_class="Qwen3_5TextConfig", fields=delta(rng))


def qwen3_5_moe(rng: Random) -> TinyModel:
    return TinyModel(config_class="Qwen3_5MoeTextConfig", fields=delta(rng) | _shared_experts(rng))
