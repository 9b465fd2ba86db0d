"""Tiny random checkpoints of every supported family, written by transformers, with a byte-level tokenizer.

Weights are seeded and large, so that greedy outputs wander through the vocabulary instead of repeating one
token. Biases and norms, which transformers would start at 0 and 1, are random too: a forgotten one shows.

Token ids: a byte is its own id, then `<|endoftext|>` 256, `<|im_start|>` 257, `<|im_end|>` 258.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

END_OF_TEXT, IM_START, IM_END = 256, 257, 258
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 259
SHARD_SIZE = "100KB"
CHOICE_BIAS = "e_score_correction_bias"
"""Scores lie between 0 and 1: a bias around 0.1 changes which experts some tokens choose, and not those of all."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": END_OF_TEXT,
    "pad_token_id": END_OF_TEXT,
}


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """One checkpoint: a transformers config class and what differs from `_SIZES`."""

    config_class: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    sharded: bool = False
    vision: Mapping[str, Any] | None = None
    """Of the image part, in a model that has one; `fields` are then those of its text part."""


_GEMMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB_SIZE + 5,
    "final_logit_softcapping": 5.0,
}

TINY_MODELS = {
    "llama-llama3-rope": TinyModel(
        config_class="LlamaConfig",
        fields={
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama-bias": TinyModel(
        config_class="LlamaConfig", fields={"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "llama-linear-rope": TinyModel(
        config_class="LlamaConfig",
        fields={"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-dynamic-rope": TinyModel(
        config_class="LlamaConfig",
        fields={"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "qwen2": TinyModel(config_class="Qwen2Config", fields={"tie_word_embeddings": True}),
    "qwen2-yarn": TinyModel(
        config_class="Qwen2Config",
        fields={
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3": TinyModel(
        config_class="Qwen3Config",
        fields={"head_dim": 32, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}},
    ),
    "qwen3-sharded": TinyModel(
        config_class="Qwen3Config", fields={"head_dim": 32, "tie_word_embeddings": False}, sharded=True
    ),
    "qwen2-window": TinyModel(
        config_class="Qwen2Config", fields={"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    ),
    "mistral": TinyModel(config_class="MistralConfig", fields={"sliding_window": 20}),
    "mixtral": TinyModel(
        config_class="MixtralConfig",
        fields={"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 30},
    ),
    "qwen3-moe": TinyModel(
        config_class="Qwen3MoeConfig",
        fields={
            "head_dim": 16,
            "moe_intermediate_size": 40,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe-raw-weights": TinyModel(
        config_class="Qwen3MoeConfig",
        fields={
            "head_dim": 16,
            "moe_intermediate_size": 40,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 24,
        },
    ),
    "gemma2": TinyModel(
        config_class="Gemma2Config",
        fields={
            "head_dim": 16,
            "sliding_window": 20,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": TinyModel(
        config_class="Gemma3TextConfig",
        fields={
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 20,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma4": TinyModel(config_class="Gemma4TextConfig", fields=_GEMMA4),
    "gemma4-readers": TinyModel(
        config_class="Gemma4TextConfig",
        fields={
            **_GEMMA4,
            "num_hidden_layers": 6,
            "num_key_value_heads": 1,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "attention_k_eq_v": False,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4-experts": TinyModel(
        config_class="Gemma4TextConfig",
        fields={
            **_GEMMA4,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
            "use_bidirectional_attention": "vision",
        },
    ),
    "gpt-oss": TinyModel(
        config_class="GptOssConfig",
        fields={
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 20,
            "swiglu_limit": 1.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen2-moe": TinyModel(
        config_class="Qwen2MoeConfig",
        fields={
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 2,
            "num_hidden_layers": 4,
        },
    ),
    "olmo2": TinyModel(config_class="Olmo2Config"),
    "olmo3": TinyModel(
        config_class="Olmo3Config",
        fields={
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            },
        },
    ),
    "exaone4": TinyModel(
        config_class="Exaone4Config",
        fields={"sliding_window": 20, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "glm4": TinyModel(config_class="Glm4Config", fields={"head_dim": 16}),
    "cohere2": TinyModel(
        config_class="Cohere2Config",
        fields={
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "logit_scale": 0.5,
        },
    ),
    "phi3": TinyModel(config_class="Phi3Config", fields={"sliding_window": 20}),
    "phi4-mini": TinyModel(
        config_class="Phi3Config",
        fields={
            # As long as the context: another test has longer ones, whose angles depend on the engine.
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + 0.1 * pair for pair in range(6)],
                "long_factor": [2.0 + pair for pair in range(6)],
                "original_max_position_embeddings": 512,
            },
        },
    ),
    "granite": TinyModel(
        config_class="GraniteConfig",
        fields={
            "attention_bias": True,
            "logits_scaling": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.7,
            "embedding_multiplier": 2.0,
        },
    ),
    "smollm3": TinyModel(
        config_class="SmolLM3Config",
        fields={"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 20},
    ),
    "seed-oss": TinyModel(config_class="SeedOssConfig", fields={"head_dim": 32, "attention_out_bias": True}),
    "ernie": TinyModel(config_class="Ernie4_5Config", fields={"head_dim": 16, "tie_word_embeddings": False}),
    "hunyuan": TinyModel(
        config_class="HunYuanDenseV1Config",
        fields={
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "ministral3": TinyModel(
        config_class="Ministral3Config",
        fields={
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    "glm4-moe": TinyModel(
        config_class="Glm4MoeConfig",
        fields={
            "head_dim": 16,
            "use_qk_norm": True,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "ernie-moe": TinyModel(
        config_class="Ernie4_5_MoeConfig",
        fields={"moe_intermediate_size": 24, "moe_num_experts": 5, "moe_k": 2, "tie_word_embeddings": False},
    ),
    "hunyuan-moe": TinyModel(
        config_class="HunYuanMoEV1Config", fields={"head_dim": 16, "num_experts": 4, "moe_topk": 2}
    ),
    "minimax-m2": TinyModel(
        config_class="MiniMaxM2Config",
        fields={
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        },
    ),
}

_LLAMA4 = {
    "head_dim": 16,
    "attention_chunk_size": 24,
    "floor_scale": 16,
    "attn_scale": 0.3,
    "intermediate_size": 40,
    "intermediate_size_mlp": 72,
    "num_local_experts": 4,
    "no_rope_layers": [1, 0, 1],
}

TINY_MODELS |= {
    "llama4": TinyModel(
        config_class="Llama4TextConfig",
        fields={
            **_LLAMA4,
            "interleave_moe_layer_step": 2,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama4-two-experts": TinyModel(
        config_class="Llama4TextConfig",
        fields={**_LLAMA4, "num_experts_per_tok": 2, "use_qk_norm": False, "attention_bias": True},
    ),
}

_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
}
"""No two sizes of attention are equal, so that none can stand for another."""

TINY_MODELS |= {
    "deepseek-v2": TinyModel(
        config_class="DeepseekV2Config",
        fields={
            **_LATENT,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "topk_method": "greedy",
        },
    ),
    "deepseek-v2-groups": TinyModel(
        config_class="DeepseekV2Config",
        fields={
            **_LATENT,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 2.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
        },
    ),
    "deepseek-v3": TinyModel(
        config_class="DeepseekV3Config",
        fields={
            **_LATENT,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "deepseek-v3-bias": TinyModel(
        config_class="DeepseekV3Config",
        fields={
            **_LATENT,
            "attention_bias": True,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "n_shared_experts": 2,
        },
    ),
    "glm4-moe-lite": TinyModel(
        config_class="Glm4MoeLiteConfig",
        fields={
            **_LATENT,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_group": 2,
            "topk_group": 1,
            "rms_norm_eps": 1e-2,
        },
    ),
}

_DELTA = {
    # A state that is close to zero is normalized: with larger weights and a smaller epsilon, rounding would grow by
    # factors of thousands, in transformers between its own two forms of the rule too.
    "initializer_range": 0.1,
    "rms_norm_eps": 3e-2,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
}
_SPARSE = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}

TINY_MODELS |= {
    "qwen3-next": TinyModel(config_class="Qwen3NextConfig", fields={**_DELTA, **_SPARSE, "mlp_only_layers": [2]}),
    "qwen3.5": TinyModel(
        config_class="Qwen3_5TextConfig", fields={**_DELTA, "linear_conv_kernel_dim": 3, "attention_bias": True}
    ),
    "qwen3.5-moe": TinyModel(
        config_class="Qwen3_5MoeTextConfig", fields={**_DELTA, **_SPARSE, "linear_num_value_heads": 4}
    ),
}

_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}

TOWER_MODELS = {
    "gemma3-tower": TinyModel(
        config_class="Gemma3Config",
        fields={"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 24},
        vision={**_VISION, "image_size": 16},
    ),
    "gemma4-tower": TinyModel(
        config_class="Gemma4Config",
        fields=_GEMMA4,
        vision={**_VISION, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64},
    ),
    "llama4-tower": TinyModel(
        config_class="Llama4Config",
        fields=_LLAMA4,
        vision={
            **_VISION,
            "image_size": 16,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "pixel_shuffle_ratio": 0.5,
        },
    ),
    "mistral3-tower": TinyModel(
        config_class="Mistral3Config",
        fields={**TINY_MODELS["ministral3"].fields, "model_type": "ministral3"},
        vision={**_VISION, "model_type": "pixtral", "image_size": 16, "head_dim": 16},
    ),
    "qwen2-tower": TinyModel(
        config_class="Qwen2_5_VLConfig", fields={"rope_parameters": _SECTIONS}, vision=_QWEN_VISION
    ),
    "qwen3-tower": TinyModel(
        config_class="Qwen3VLConfig",
        fields={"head_dim": 16, "rope_parameters": {**_SECTIONS, "mrope_interleaved": True}},
        vision={**_QWEN_VISION, "deepstack_visual_indexes": [0]},
    ),
    "qwen3.5-tower": TinyModel(
        config_class="Qwen3_5Config",
        fields={**_DELTA, "rope_parameters": {**_SECTIONS, "mrope_interleaved": True, "partial_rotary_factor": 0.5}},
        vision=_QWEN_VISION,
    ),
    "qwen3.5-moe-tower": TinyModel(
        config_class="Qwen3_5MoeConfig",
        fields={**_DELTA, **_SPARSE, "linear_num_value_heads": 4, "rope_parameters": _SECTIONS},
        vision=_QWEN_VISION,
    ),
}
"""Models that take images, of whose text part the family is served."""

FALLBACK_MODELS = {
    "apertus": TinyModel(config_class="ApertusConfig", fields={"rope_parameters": {"rope_theta": 1e4}}),
    "arcee": TinyModel(config_class="ArceeConfig"),
    "biogpt": TinyModel(config_class="BioGptConfig"),
    "cohere": TinyModel(config_class="CohereConfig", fields={"logit_scale": 0.5}),
    "gemma": TinyModel(config_class="GemmaConfig", fields={"head_dim": 16}),
    "gpt2": TinyModel(config_class="GPT2Config"),
    "gpt-neox": TinyModel(config_class="GPTNeoXConfig"),
    "olmoe": TinyModel(config_class="OlmoeConfig", fields={"num_experts": 4, "num_experts_per_tok": 2}),
    "opt": TinyModel(config_class="OPTConfig", fields={"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "phi": TinyModel(config_class="PhiConfig"),
    "starcoder2": TinyModel(config_class="Starcoder2Config", fields={"sliding_window": 20}),
}
"""Architectures that only transformers computes."""

_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}

STATEFUL_MODELS = {
    "bamba": TinyModel(config_class="BambaConfig", fields={**_MAMBA2, "attn_layer_indices": [1]}),
    "falcon-h1": TinyModel(
        config_class="FalconH1Config", fields={**_MAMBA2, "mamba_d_ssm": 128, "head_dim": 16, "key_multiplier": 0.8}
    ),
    "granite-hybrid": TinyModel(
        config_class="GraniteMoeHybridConfig",
        fields={
            **_MAMBA2,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "shared_intermediate_size": 48,
        },
    ),
    "jamba": TinyModel(
        config_class="JambaConfig",
        fields={"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4, "use_mamba_kernels": False},
    ),
    "lfm2": TinyModel(
        config_class="Lfm2Config",
        fields={"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    ),
    "lfm2-moe": TinyModel(
        config_class="Lfm2MoeConfig",
        fields={
            "layer_types": ["conv", "full_attention", "conv"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_dense_layers": 1,
            "moe_intermediate_size": 40,
        },
    ),
    "nemotron-h": TinyModel(
        config_class="NemotronHConfig",
        fields={
            "layers_block_type": ["mamba", "attention", "moe", "mamba", "attention"],
            "num_hidden_layers": 5,
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 12,
            "n_groups": 2,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 48,
            "use_mamba_kernels": False,
        },
    ),
    "olmo-hybrid": TinyModel(
        config_class="OlmoHybridConfig",
        fields={
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
        },
    ),
    "zamba2": TinyModel(
        config_class="Zamba2Config",
        fields={
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "num_mem_blocks": 1,
            "num_key_value_heads": 4,
            "n_mamba_heads": 8,
            "mamba_d_state": 12,
            "chunk_size": 16,
            "use_mem_rope": True,
            "use_mamba_kernels": False,
        },
    ),
}
"""Architectures with states, which transformers computes over ours."""

UNSUPPORTED_MODELS = {
    "mamba": TinyModel(config_class="MambaConfig"),
    "kimi-linear": TinyModel(
        config_class="KimiLinearConfig",
        fields={
            "num_key_value_heads": 4,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 20,
            "qk_rope_head_dim": 16,
            "v_head_dim": 12,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "minimax": TinyModel(config_class="MiniMaxConfig"),
    "bloom": TinyModel(config_class="BloomConfig"),
    "nemotron": TinyModel(config_class="NemotronConfig"),
    "bart": TinyModel(config_class="BartConfig"),
    "falcon": TinyModel(config_class="FalconConfig"),
    "stablelm": TinyModel(config_class="StableLmConfig"),
    "roberta": TinyModel(config_class="RobertaConfig", fields={"is_decoder": True, "pad_token_id": 1}),
    "xlm-roberta": TinyModel(config_class="XLMRobertaConfig", fields={"is_decoder": True, "pad_token_id": 1}),
}
"""Architectures that keep more than keys and values of one size, or keep callers from their attention."""


def tiny_config(name: str) -> Any:
    """The config of transformers of the model of that name."""
    return config_of(_tiny_model(name))


def config_of(tiny: TinyModel) -> Any:
    """The config of transformers of a model."""
    import transformers

    fields = {**_SIZES, **tiny.fields}
    if tiny.vision is not None:
        fields = {"text_config": fields, "vision_config": dict(tiny.vision), "tie_word_embeddings": False}
    return getattr(transformers, tiny.config_class)(**fields)


def _tiny_model(name: str) -> TinyModel:
    models = {**TINY_MODELS, **TOWER_MODELS, **FALLBACK_MODELS, **STATEFUL_MODELS, **UNSUPPORTED_MODELS}
    return models[name]


def write_tiny_checkpoint(name: str, directory: Path, *, seed: int = 0) -> Path:
    """Write the model of that name, with its tokenizer, into `directory` in float32, and return it."""
    return write_checkpoint(_tiny_model(name), directory, seed=seed)


def write_checkpoint(tiny: TinyModel, directory: Path, *, seed: int = 0) -> Path:
    """As `write_tiny_checkpoint`, of a model that has no name."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForCausalLM if tiny.vision is None else AutoModelForImageTextToText
    config = config_of(tiny)
    torch.manual_seed(seed)
    model = kind.from_config(config, dtype=torch.float32)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("norm.weight", "norm_1.weight", "norm_2.weight", "router.scale", "expert_scale")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
        elif parameter_name.endswith("bias") and not parameter_name.endswith(CHOICE_BIAS):
            torch.nn.init.normal_(parameter, std=0.3)
        elif tiny.config_class.startswith("Gemma") and parameter_name.endswith("embed_tokens.weight"):
            # Scaled by √hidden_size and tied to the output, a larger one would repeat its own token forever.
            torch.nn.init.normal_(parameter, std=0.04)
    for name_of_bias, bias in (*model.named_parameters(), *model.named_buffers()):
        if name_of_bias.endswith(CHOICE_BIAS):
            torch.nn.init.normal_(bias, std=0.1)
        elif name_of_bias.endswith("layer_scalar"):
            torch.nn.init.uniform_(bias, 0.7, 1.3)
    model.generation_config.eos_token_id = [IM_END, END_OF_TEXT]
    model.save_pretrained(directory, **({"max_shard_size": SHARD_SIZE} if tiny.sharded else {}))
    write_byte_tokenizer(directory)
    return directory


def write_tiny_eagle3(target: Path, directory: Path, *, seed: int = 1, layers: tuple[int, ...] | None = None) -> Path:
    """Write a random EAGLE-3 head for the tiny checkpoint in `target` as SpecForge writes one, and return it.

    It has every third id of the target. `layers`: those whose outputs it reads; None leaves them at the default.
    """
    import torch
    from safetensors.torch import save_file

    config = json.loads((target / "config.json").read_text())
    size, inner, vocab, width = config["hidden_size"], 80, config["vocab_size"], 16
    own = torch.arange(0, vocab, 3)
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator) * 0.2

    def norm() -> Any:
        return torch.rand(size, generator=generator) + 0.5

    projections = {"q_proj": (4 * width, 2 * size), "k_proj": (2 * width, 2 * size), "v_proj": (2 * width, 2 * size)}
    blocks = {"gate_proj": (inner, size), "up_proj": (inner, size), "down_proj": (size, inner)}
    tensors = {
        "fc.weight": matrix(size, size * (3 if layers is None else len(layers))),
        "lm_head.weight": matrix(len(own), size),
        "norm.weight": norm(),
        "d2t": own - torch.arange(len(own)),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill_(0, own, True),
        **{
            f"midlayer.{name}.weight": norm() for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
        **{f"midlayer.self_attn.{name}.weight": matrix(*shape) for name, shape in projections.items()},
        "midlayer.self_attn.o_proj.weight": matrix(size, 4 * width),
        **{f"midlayer.mlp.{name}.weight": matrix(*shape) for name, shape in blocks.items()},
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    named = {} if layers is None else {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    facts = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "draft_vocab_size": len(own),
        "tie_word_embeddings": False,
        **named,
    }
    (directory / "config.json").write_text(json.dumps(facts))
    return directory


def write_byte_tokenizer(directory: Path) -> None:
    """tokenizer.json and tokenizer_config.json of a tokenizer whose tokens are bytes, with a ChatML template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={character: byte for byte, character in _byte_alphabet()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _byte_alphabet() -> list[tuple[int, str]]:
    """GPT-2's printable stand-in for each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [(byte, chr(byte if byte in printable else next(stand_ins))) for byte in range(256)]


def write_tiny_head(target: Path, directory: Path, *, seed: int = 1) -> Path:
    """Write a random EAGLE head for the tiny checkpoint in `target` into `directory`, and return it."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((target / "config.json").read_text())
    size = config["hidden_size"]
    generator = torch.Generator().manual_seed(seed)
    block = {
        name: torch.randn(tensor.shape, generator=generator) * 0.2
        for shard in sorted(target.glob("*.safetensors"))
        for name, tensor in load_file(shard).items()
        if name.startswith("model.layers.0.")
    }
    tensors = {
        "fc.weight": torch.randn(size, 2 * size, generator=generator) * 0.2,
        "model.norm.weight": torch.rand(size, generator=generator) + 0.5,
        **block,
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    config |= {"num_hidden_layers": 1}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:1]
    (directory / "config.json").write_text(json.dumps(config))
    return directory
