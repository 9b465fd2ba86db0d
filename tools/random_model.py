"""A checkpoint with random weights and the shape of a real model, for benchmarks.

    python tools/random_model.py 125M /tmp/random-125m
    python tools/random_model.py 3M /tmp/random-hybrid --family qwen3_next

Speed does not depend on what the weights say, and no model hub is needed. The tokenizer of the bundled model
comes along, so that every command of Tandem works on the result; the text it writes is noise.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

TOKENIZER = Path(__file__).parent.parent / "models" / "tandem-mini"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Shape(NamedTuple):
    """Of a Qwen3 or Mixtral, or of a Qwen3-Next with as many heads in layers with states; head_dim is 64."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int
    vocab_size: int


SHAPES = {
    "3M": Shape(128, 4, 4, 2, 256, 3072),
    "25M": Shape(384, 8, 6, 2, 1024, 16384),
    "125M": Shape(768, 12, 12, 4, 2048, 32768),
    "500M": Shape(1024, 28, 16, 8, 3072, 65536),
    "1B": Shape(2048, 16, 32, 8, 8192, 32768),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SHAPES, help="parameters, about")
    parser.add_argument("directory", type=Path, help="where the checkpoint is written; must not exist")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    if args.directory.exists():
        parser.error(f"{args.directory} exists; remove it or name another directory")
    make_model(SHAPES[args.size], args.directory, getattr(torch, args.dtype), family=args.family)


FAMILIES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
}


def _of_family(family: str, shape: Shape) -> dict[str, Any]:
    """Further fields: four experts, but of a Qwen3; of a Qwen3-Next three layers with states before each with
    attention."""
    if family == "qwen3":
        return {}
    if family == "mixtral":
        return {"num_local_experts": 4, "num_experts_per_tok": 2}
    inner = shape.intermediate_size // 4
    return {
        "layer_types": ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(shape.layers)],
        "linear_num_key_heads": shape.kv_heads,
        "linear_num_value_heads": shape.heads,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner,
    }


def make_model(shape: Shape, directory: Path, dtype: torch.dtype, *, family: str = "qwen3") -> None:
    """Write the checkpoint. The same shape gives the same weights."""
    torch.manual_seed(0)
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=64,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        eos_token_id=0,
        dtype=dtype,
        **_of_family(family, shape),
    )
    model = model_class(config).to(dtype)
    model.save_pretrained(directory)
    for name in TOKENIZER_FILES:
        source = TOKENIZER / name
        if source.is_file():
            shutil.copy(source, directory / name)
    print(f"{directory}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters, {dtype}")


if __name__ == "__main__":
    main()
