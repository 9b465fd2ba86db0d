"""Real models, as a config.json for the engine and as numbers for what their steps cost at least."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder: dense, or with the same number of experts in every layer."""

    name: str
    config: dict[str, Any]

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def hidden(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def inner(self) -> int:
        return int(self.config["intermediate_size"])

    @property
    def heads(self) -> int:
        return int(self.config["num_attention_heads"])

    @property
    def kv_heads(self) -> int:
        return int(self.config["num_key_value_heads"])

    @property
    def head_dim(self) -> int:
        return int(self.config["head_dim"])

    @property
    def experts(self) -> int:
        """Of a layer; 0 for a dense model."""
        return int(self.config.get("num_experts", 0))

    @property
    def experts_per_token(self) -> int:
        return int(self.config.get("num_experts_per_tok", 0))

    @property
    def expert_inner(self) -> int:
        return int(self.config.get("moe_intermediate_size", 0))

    @property
    def body_parameters(self) -> int:
        """Of the matrices that every token goes through, of experts as many as it chooses."""
        chosen = self.experts_per_token * self._expert_parameters if self.experts else 3 * self.hidden * self.inner
        return self.layers * (self._attention_parameters + self.hidden * self.experts + chosen)

    @property
    def parameters(self) -> int:
        """Of all matrices."""
        unchosen = (self.experts - self.experts_per_token) * self._expert_parameters
        embedding = 1 if self.config["tie_word_embeddings"] else 2
        return self.body_parameters + self.layers * unchosen + embedding * self.head_parameters

    @property
    def _attention_parameters(self) -> int:
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def _expert_parameters(self) -> int:
        return 3 * self.hidden * self.expert_inner

    @property
    def head_parameters(self) -> int:
        return int(self.config["vocab_size"]) * self.hidden

    def kv_bytes(self, tokens: int, itemsize: int) -> int:
        return tokens * 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def decode_bytes(self, batch: int, context: int, itemsize: int, *, kv_itemsize: int | None = None) -> int:
        """What a step has to read: all matrices once, and the KV of every sequence.

        Of experts those that some sequence is expected to choose, if each is as likely as the others.
        """
        dense = self.body_parameters + self.head_parameters
        if self.experts:
            some = self.experts * (1 - (1 - self.experts_per_token / self.experts) ** batch)
            dense += int(self.layers * (some - self.experts_per_token) * self._expert_parameters)
        return dense * itemsize + self.kv_bytes(batch * context, kv_itemsize or itemsize)

    def prefill_flops(self, tokens: int) -> int:
        """Of one prompt: every token through the body, causal attention, one token through the head."""
        return 2 * self.body_parameters * tokens + self.attention_flops(tokens) + 2 * self.head_parameters

    def attention_flops(self, tokens: int) -> int:
        """Of causal attention in all layers."""
        return 2 * self.layers * self.heads * self.head_dim * tokens * tokens

    def write(self, folder: Path) -> Path:
        """A model directory without weights, for `--load-format dummy`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=1), "utf-8")
        return folder


class LatentShape(Shape):
    """Latent attention, and routed and shared experts in every layer, which its first one has not: counted as if."""

    @property
    def experts(self) -> int:
        return int(self.config["n_routed_experts"])

    @property
    def body_parameters(self) -> int:
        """See `Shape.body_parameters`."""
        active = (self.experts_per_token + int(self.config["n_shared_experts"])) * self._expert_parameters
        return self.layers * (self._attention_parameters + self.hidden * self.experts + active)

    @property
    def _attention_parameters(self) -> int:
        """Of queries without a latent, keys and values from one, and the output."""
        rank, turned = int(self.config["kv_lora_rank"]), int(self.config["qk_rope_head_dim"])
        plain, value = int(self.config["qk_nope_head_dim"]), int(self.config["v_head_dim"])
        own = self.heads * (plain + turned + value)
        return self.hidden * (own + rank + turned) + rank * self.heads * (plain + value)

    def kv_bytes(self, tokens: int, itemsize: int) -> int:
        """See `Shape.kv_bytes`."""
        return tokens * self.layers * self._width * itemsize

    def attention_flops(self, tokens: int) -> int:
        """See `Shape.attention_flops`: scores of whole latents, values without what is rotated."""
        return self.layers * self.heads * (self._width + int(self.config["kv_lora_rank"])) * tokens * tokens

    @property
    def _width(self) -> int:
        return int(self.config["kv_lora_rank"]) + int(self.config["qk_rope_head_dim"])


class HybridShape(Shape):
    """Layers with states, every few of them one of attention with gates; routed experts and one shared in each."""

    @property
    def _full_layers(self) -> int:
        return self.layers // int(self.config["full_attention_interval"])

    @property
    def body_parameters(self) -> int:
        """See `Shape.body_parameters`."""
        active = self.experts_per_token * self._expert_parameters
        shared = 3 * self.hidden * int(self.config["shared_expert_intermediate_size"])
        full, states = self._full_layers, self.layers - self._full_layers
        attention = self._attention_parameters + self.hidden * self.head_dim * self.heads
        sparse = self.layers * (self.hidden * self.experts + active + shared)
        return full * attention + states * self._state_parameters + sparse

    @property
    def _state_parameters(self) -> int:
        keys, values = (
            int(self.config[f"linear_num_{kind}_heads"]) * int(self.config[f"linear_{kind}_head_dim"])
            for kind in ("key", "value")
        )
        return self.hidden * (2 * keys + 3 * values + 2 * int(self.config["linear_num_value_heads"]))

    def kv_bytes(self, tokens: int, itemsize: int) -> int:
        """See `Shape.kv_bytes`; states are not counted."""
        return Shape.kv_bytes(self, tokens, itemsize) * self._full_layers // self.layers

    def attention_flops(self, tokens: int) -> int:
        """See `Shape.attention_flops`; what states take is not counted."""
        return Shape.attention_flops(self, tokens) * self._full_layers // self.layers


_COMMON = {
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}

QWEN3_0_6B = Shape(
    name="Qwen3-0.6B",
    config=_COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
)
LLAMA_3_1_8B = Shape(
    name="Llama-3.1-8B",
    config=_COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
)
QWEN3_30B_A3B = Shape(
    name="Qwen3-30B-A3B",
    config=_COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
)
DEEPSEEK_V2_LITE = LatentShape(
    name="DeepSeek-V2-Lite",
    config=_COMMON
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "vocab_size": 102400,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
)
QWEN3_NEXT_QUARTER = HybridShape(
    name="Qwen3-Next-80B-A3B, 12 of 48 layers",
    config=_COMMON
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
)
"""As many layers as one card has room for, beside KV and states."""
DEEPSEEK_V3 = Shape(name="DeepSeek-V3", config={"num_attention_heads": 128})
"""As much of it as kernels are measured with."""
TINY = Shape(
    name="tiny",
    config=QWEN3_0_6B.config
    | {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "max_position_embeddings": 2048,
    },
)
"""To try the programs where there is no device."""
TINY_MOE = Shape(
    name="tiny MoE",
    config=QWEN3_30B_A3B.config
    | {
        **{name: TINY.config[name] for name in TINY.config if name not in ("architectures", "model_type")},
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
)
TINY_LATENTS = LatentShape(
    name="tiny latents",
    config=DEEPSEEK_V2_LITE.config
    | {
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 128,
        "max_position_embeddings": 2048,
    },
)
TINY_STATES = HybridShape(
    name="tiny states",
    config=QWEN3_NEXT_QUARTER.config
    | {
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "vocab_size": 128,
        "max_position_embeddings": 2048,
    },
)
SHAPES = {
    "0.6B": QWEN3_0_6B,
    "8B": LLAMA_3_1_8B,
    "30B-A3B": QWEN3_30B_A3B,
    "V2-Lite": DEEPSEEK_V2_LITE,
    "V3": DEEPSEEK_V3,
    "Next": QWEN3_NEXT_QUARTER,
    "tiny": TINY,
    "tiny MoE": TINY_MOE,
    "tiny latents": TINY_LATENTS,
    "tiny states": TINY_STATES,
}
