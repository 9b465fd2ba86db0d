"""Prompts that put every path to work: short, long, sharing prefixes, and of odd lengths."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TOPICS = (
    "Tell me a story about a fox who lives near a river.",
    "What is the capital of France?",
    "Explain how to make a cup of tea, step by step.",
    "My name is Ada and I like the colour green. What should I plant in my garden?",
    "Count from one to ten.",
    "Once upon a time, in a village by the sea,",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """Token ids of the prompts and how much to generate after each."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int


def make_prompts(model_path: str, vocab_size: int, *, quick: bool) -> PromptSet:
    """Text prompts where the checkpoint has a tokenizer, random ids beside them; deterministic."""
    rng = random.Random(20)
    texts = [_encode(model_path, text) for text in TOPICS] if (Path(model_path) / "tokenizer.json").is_file() else []
    shared = [rng.randrange(vocab_size) for _ in range(70)]
    lengths: Sequence[int] = (1, 5, 17) if quick else (1, 2, 15, 16, 17, 33, 64, 131, 260)
    randoms = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    sharing = [
        shared + [rng.randrange(vocab_size) for _ in range(extra)] for extra in ((3, 20) if quick else (1, 3, 20, 45))
    ]
    chosen = (texts[:2] if quick else texts) + randoms + sharing
    return PromptSet(prompts=tuple(tuple(p) for p in chosen if p), max_tokens=16 if quick else 40)


def _encode(model_path: str, text: str) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = (
        Tokenizer.from_file(str(Path(model_path) / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    )
    return ids
