"""Draws that families have in common: sizes of a decoder, kinds of layers, and rotary parameters."""

from random import Random
from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
HEADS = ((4, 2), (4, 1), (6, 3), (6, 2), (5, 1), (3, 3), (7, 7), (8, 4), (9, 3))
"""Query heads and KV heads. Some KV heads do not divide by 2, the number of ranks of `tandem verify`."""
HEAD_DIMS = (8, 10, 16, 20, 24, 32, 48, 80, 96, 112)
HIDDEN_PER_HEAD = (8, 10, 12, 18)
"""Some configs of transformers want the hidden size to be a multiple of the heads, next to a `head_dim` too."""
VOCABULARIES = (259, 261, 263, 300, 511)
"""At least the 259 tokens of the tokenizer; the others are padding."""
CONTEXT = 512
WINDOWS = (2, 3, 5, 15, 16, 17, 31, 33, 70, 511, 512, 4096)
"""Shorter than a page of 16, across pages, longer than prompts, and longer than the context."""


def some(rng: Random, **chances: tuple[Any, ...]) -> dict[str, Any]:
    """One of the values of each field."""
    return {name: rng.choice(values) for name, values in chances.items()}


def decoder(rng: Random, *, head_dim: bool | None = True, even: int = 2, **more: Any) -> dict[str, Any]:
    """Fields of a plain decoder.

    Args:
        head_dim: whether the family has the field; else hidden_size is a multiple of the heads. None: some files have
            it, though the family derives it.
        even: what a head's size is a multiple of.
        more: fields with other values.
    """
    head_dim = rng.random() < 1 / 3 if head_dim is None else head_dim
    heads, kv_heads = rng.choice(HEADS)
    size = rng.choice([size for size in HEAD_DIMS if size % even == 0])
    hidden = heads * (rng.choice(HIDDEN_PER_HEAD) if head_dim else size)
    fields = {
        "vocab_size": rng.choice(VOCABULARIES),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": rng.choice((1, 2, 3, 5)),
        "intermediate_size": rng.choice((40, 57, 96, 130)),
        "tie_word_embeddings": rng.random() < 0.5,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": rng.choice((1e-6, 1e-5, 1e-2)),
        "initializer_range": 0.2 if hidden < 100 else 0.1,
    }
    return fields | ({"head_dim": size} if head_dim else {}) | more


def head_size(fields: dict[str, Any]) -> int:
    """Of a config of `decoder`."""
    return int(fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"])


def kinds(rng: Random, layers: int, *, first: str = SLIDING, second: str = FULL, last: str | None = None) -> list[str]:
    """A kind for each layer, in any order. `last`: that of the last layer."""
    drawn = [rng.choice((first, second)) for _ in range(layers)]
    return drawn if last is None else [*drawn[:-1], last]


def windows(rng: Random, layers: int) -> dict[str, Any]:
    """Layers with a window and without, in any order."""
    return {"layer_types": kinds(rng, layers), "sliding_window": rng.choice(WINDOWS)}


def rotation(rng: Random, *, exclude: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """`rope_parameters` of one kind. `more`: further parameters, of any kind."""
    theta = rng.choice((300.0, 10_000.0, 1e6))
    kind = rng.choice([kind for kind in ("default", "linear", "llama3", "yarn", "dynamic") if kind not in exclude])
    original = rng.choice((16, 64, 128))
    of_kind: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": rng.choice((1.5, 4.0))},
        "dynamic": {"factor": 2.0},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": rng.choice((1.5, 4.0)),
            "original_max_position_embeddings": original,
        },
        "yarn": {
            "factor": CONTEXT / original,
            "original_max_position_embeddings": original,
            **rng.choice(
                (
                    {},
                    {"truncate": False},
                    {"beta_fast": 16.0, "beta_slow": 2.0},
                    {"attention_factor": 0.9},
                    {"mscale": 0.7, "mscale_all_dim": 1.3},
                )
            ),
        },
    }
    return {"rope_type": kind, "rope_theta": theta, **of_kind[kind], **more}


def partial(rng: Random, size: int) -> dict[str, Any]:
    """The part of a head of `size` that rotates: a whole number of pairs."""
    pairs = rng.randint(1, size // 2)
    return {"partial_rotary_factor": 2 * pairs / size}
