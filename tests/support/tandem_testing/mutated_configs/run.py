"""Runs mutations of one checkpoint: the weights stay, config.json changes."""

import json
from collections.abc import Iterator
from pathlib import Path

from tandem_testing.mutated_configs.comparison import Comparison, compare
from tandem_testing.mutated_configs.mutations import Mutation, drawn_pairs, mutations
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

NATIVE = (
    "llama-bias",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3-moe",
    "gemma2",
    "gemma3",
    "gpt-oss",
    "qwen2-moe",
    "olmo2",
    "olmo3",
    "exaone4",
    "glm4",
    "cohere2",
    "phi3",
    "phi4-mini",
    "granite",
    "smollm3",
    "seed-oss",
    "ernie",
    "hunyuan",
    "ministral3",
    "glm4-moe",
    "ernie-moe",
    "hunyuan-moe",
    "minimax-m2",
    "deepseek-v2",
    "deepseek-v2-groups",
    "deepseek-v3",
    "glm4-moe-lite",
    "gemma3-tower",
    "mistral3-tower",
    "qwen2-tower",
    "qwen3-tower",
)
FALLBACK = ("arcee", "starcoder2", "cohere", "gpt2")
MODELS = (*NATIVE, *FALLBACK)


def run(
    name: str,
    directory: Path,
    *,
    every: int = 1,
    first: int = 0,
    only: int | None = None,
    seed: int | None = None,
    count: int = 0,
) -> Iterator[tuple[int, Mutation, Comparison]]:
    """Mutations of the tiny checkpoint `name`, which is written into `directory`: every N-th, or `only` that number.

    With a `seed`, pairs of mutations instead, of which there are `count`.
    """
    write_tiny_checkpoint(name, directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    numbered = mutations(config) if seed is None else drawn_pairs(config, seed, count)
    for number, mutation in enumerate(numbered):
        if number == only or (only is None and number % every == first):
            path.write_text(json.dumps(mutation.of(config)))
            yield number, mutation, compare(directory)
