"""Real models, as a config.json for the engine and as numbers for what their steps cost at least."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
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
        attention = 2 * self.layers * self.heads * self.head_dim * tokens * tokens
        return 2 * self.body_parameters * tokens + attention + 2 * self.head_parameters

    def write(self, folder: Path) -> Path:
        """A model directory without weights, for `--load-format dummy`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=1), "utf-8")
        return folder


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
SHAPES = {
    "0.6B": QWEN3_0_6B,
    "8B": LLAMA_3_1_8B,
    "30B-A3B": QWEN3_30B_A3B,
    "V3": DEEPSEEK_V3,
    "tiny": TINY,
    "tiny MoE": TINY_MOE,
}
