"""Real models, as a config.json for the engine and as numbers for what their steps cost at least."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A dense decoder."""

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
    def body_parameters(self) -> int:
        """Of the matrices that every token goes through."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def head_parameters(self) -> int:
        return int(self.config["vocab_size"]) * self.hidden

    def kv_bytes(self, tokens: int, itemsize: int) -> int:
        return tokens * 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def decode_bytes(self, batch: int, context: int, itemsize: int) -> int:
        """What a step has to read: all matrices once, and the KV of every sequence."""
        matrices = (self.body_parameters + self.head_parameters) * itemsize
        return matrices + self.kv_bytes(batch * context, itemsize)

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
SHAPES = {"0.6B": QWEN3_0_6B, "8B": LLAMA_3_1_8B, "tiny": TINY}
