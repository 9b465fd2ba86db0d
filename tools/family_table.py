"""Prints docs/models.md with the table of model families as the code and its tests have it.

    PYTHONPATH=tests/support .venv/bin/python tools/family_table.py > /tmp/models.md && mv /tmp/models.md docs/models.md
    PYTHONPATH=tests/support .venv/bin/python tools/family_table.py --check

The rest of the page is printed as it is. What a family adds to a plain decoder, and the sizes of a published model,
stand here; everything else is read from the families, the fused CPU step and the lists of the tests. `--check` prints
nothing and exits with 1 if the page has another table.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import transformers

from tandem_engine.config import ModelConfig, NormKind, QkNorm
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.cpu.step import is_plain
from tandem_engine.model.decoder import attention_specs
from tandem_engine.model.families.registry import FAMILIES
from tandem_engine.model.families.text_towers import TOWERS
from tandem_engine.model.known_fields import Family
from tandem_testing.exactness import ADDED_PATHS, ALL_PATHS, REDUCED_PATHS
from tandem_testing.tiny_checkpoints import TINY_MODELS, tiny_config

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"


class Published(NamedTuple):
    """A model of a family, and what the family adds to a plain decoder."""

    adds: str
    name: str
    layers: int
    kv_heads: int
    head_dim: int
    parts: int = 2
    """K and V, or one latent."""
    state_mb: float = 0.0
    """Of a request in bfloat16, in layers with states; `layers` are the others."""

    @property
    def kv_bytes(self) -> int:
        """Of one token in bfloat16, in all layers."""
        return self.parts * self.layers * self.kv_heads * self.head_dim * 2

    @property
    def states(self) -> str:
        """What comes to that for a request."""
        return f", and {self.state_mb} MB a request" if self.state_mb else ""


PUBLISHED = {
    "llama": Published("rope default, linear, dynamic, llama3, yarn; biases", "Llama 3.1 8B", 32, 8, 128),
    "mistral": Published("sliding window", "Mistral 7B", 32, 8, 128),
    "mixtral": Published("experts, sliding window", "Mixtral 8x7B", 32, 8, 128),
    "qwen2": Published("q, k, v bias; sliding window in some layers", "Qwen2.5 7B", 28, 4, 128),
    "qwen3": Published("norms on q and k; sliding window in some layers", "Qwen3 8B", 36, 8, 128),
    "gemma2": Published(
        "capped scores and logits, every second layer with a window, norms before and after each block",
        "Gemma 2 9B",
        42,
        8,
        256,
    ),
    "gemma3_text": Published(
        "windows in five of six layers, two rotary bases, norms on q and k", "Gemma 3 27B", 62, 16, 128
    ),
    "gemma4_text": Published(
        "heads of another size and a proportional rotation in layers without a window, norms on q, k and v, layers "
        "that read K and V of others, further inputs of each layer, experts next to each block",
        "sizes of transformers' defaults",
        25 + 2 * 5,  # five layers have heads of twice the size
        4,
        256,
    ),
    "gpt_oss": Published(
        "attention sinks, every second layer with a window, biases, YaRN without truncation, experts with biases and a "
        "clamped gate, plain or MXFP4",
        "gpt-oss 20B",
        24,
        8,
        64,
    ),
    "llama4_text": Published(
        "chunks in three of four layers, the others without rotation and with queries scaled by position, unweighted "
        "norms on q and k, experts with weighted inputs and a shared one",
        "Llama 4 Scout",
        48,
        8,
        128,
    ),
    "qwen3_moe": Published(
        "experts (top-k normalized or not, dense layers between), sliding window", "Qwen3 30B-A3B", 48, 4, 128
    ),
    "qwen2_moe": Published("experts and a gated shared one, q, k, v bias", "Qwen2-57B-A14B", 28, 4, 128),
    "glm4_moe": Published(
        "experts chosen by sigmoid, correction bias and group; shared expert; half of each head rotates",
        "GLM-4.5-Air",
        46,
        8,
        128,
    ),
    "ernie4_5_moe": Published(
        "experts chosen with a correction bias, shared experts, neighboring pairs rotate",
        "ERNIE 4.5 21B-A3B",
        28,
        4,
        128,
    ),
    "hunyuan_v1_moe": Published(
        "experts and a shared one, norms on q and k after their rotation", "Hunyuan A13B", 32, 8, 128
    ),
    "minimax_m2": Published(
        "experts chosen by sigmoid and correction bias, one norm over all heads of q, one of k",
        "MiniMax M2",
        62,
        8,
        128,
    ),
    "olmo2": Published("norms after each block, one norm over all heads of q, one of k", "OLMo 2 7B", 32, 32, 128),
    "olmo3": Published("as olmo2; windows in three of four layers, yarn in the others", "OLMo 3 7B", 32, 32, 128),
    "exaone4": Published(
        "norms after each block, norms on q and k, layers without rotation", "EXAONE 4 32B", 64, 8, 128
    ),
    "glm4": Published("norms around each block; half of each head rotates, in pairs", "GLM-4 9B 0414", 40, 2, 128),
    "cohere2": Published(
        "LayerNorm, parallel blocks, windows, layers without rotation, scaled logits", "Command R7B", 32, 8, 128
    ),
    "phi3": Published("joined projections, longrope, partial rotation, sliding window", "Phi-4-mini", 32, 8, 128),
    "granite": Published("factors of embeddings, scores, residuals and logits", "Granite 3.3 8B", 40, 8, 128),
    "smollm3": Published("every fourth layer without rotation", "SmolLM3 3B", 36, 4, 128),
    "seed_oss": Published("q, k, v bias", "Seed-OSS 36B", 64, 8, 128),
    "ernie4_5": Published("neighboring pairs rotate", "ERNIE 4.5 0.3B", 18, 2, 128),
    "hunyuan_v1_dense": Published("norms on q and k after their rotation", "Hunyuan 7B", 32, 8, 128),
    "ministral3": Published("queries scaled by position, yarn", "Ministral 3 8B", 34, 8, 128),
    "deepseek_v2": Published(
        "latents (MLA); experts chosen by softmax, `greedy` or `group_limited_greedy`; shared experts",
        "DeepSeek V2 Lite",
        27,
        1,
        576,
        parts=1,
    ),
    "deepseek_v3": Published(
        "latents; experts chosen by sigmoid, correction bias and group; shared experts; R1, V3.1 and Kimi K2 too",
        "DeepSeek V3, Kimi K2",
        61,
        1,
        576,
        parts=1,
    ),
    "glm4_moe_lite": Published(
        "as deepseek_v3; dense layers by `mlp_layer_types`", "GLM-4.7-Flash", 47, 1, 576, parts=1
    ),
    "qwen3_next": Published(
        "states (gated delta rule) in three of four layers, gated outputs of attention in the others; experts and a "
        "gated shared one; a quarter of each head rotates",
        "Qwen3-Next 80B-A3B",
        12,
        2,
        256,
        state_mb=77.3,
    ),
    "qwen3_5_text": Published("as qwen3_next, without experts", "Qwen3.5 9B", 8, 4, 256, state_mb=51.5),
    "qwen3_5_moe_text": Published("as qwen3_next", "Qwen3.5 35B-A3B", 10, 2, 256, state_mb=64.4),
}

COLUMNS = (
    "family",
    "`architectures`",
    "in addition to a plain decoder",
    "computed by",
    "tensor parallel",
    "quantized",
    "fused CPU step",
    "on a GPU by torch",
    "drafts",
    "KV bytes per token",
    "exactness tests",
)
ANY_OTHER = (
    "any other",
    "that passes the examination [below](#computed-by-transformers)",
    "",
    "transformers",
    "rejected",
    "rejected",
    "–",
    "all but attention",
    "all but EAGLE; with states rejected",
    "2 · layers · KV heads · head_dim · 2",
    "mixed, prefix-cached",
)


def table() -> Iterator[str]:
    """Its lines."""
    tiny = tiny_of_families()
    yield line(COLUMNS)
    yield line(("---",) * len(COLUMNS)).replace(" ", "")
    for family in FAMILIES:
        yield line(row(family, tiny[family.name]))
    yield line(ANY_OTHER)


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def tiny_of_families() -> dict[str, dict[str, ModelConfig]]:
    """The configs of tiny checkpoints by name, of each family."""
    found: dict[str, dict[str, ModelConfig]] = {family.name: {} for family in FAMILIES}
    for name in TINY_MODELS:
        config = tiny_config(name).to_dict()
        family = next(family for family in FAMILIES if family.name == config["model_type"])
        values = {**config, "architectures": [family.architecture]}
        found[family.name][name] = family.parse(ConfigFields(path=Path("config.json"), values=values))
    return found


def row(family: Family, tiny: dict[str, ModelConfig]) -> tuple[str, ...]:
    """Of a family that Tandem computes; those are all shared by ranks and quantized."""
    published, config = PUBLISHED[family.name], next(iter(tiny.values()))
    towers = [f"`{tower.architecture}` (text part)" for tower in TOWERS if family.name in tower.texts.values()]
    return (
        family.name,
        ", ".join([f"`{family.architecture}`", *towers]),
        published.adds,
        "Tandem",
        "yes",
        "yes",
        "yes" if any(is_plain(each, attention_specs(each)) for each in tiny.values()) else "–",
        by_torch(config),
        "yes" if config.delta is None else "yes, not as the draft model",
        f"{published.kv_bytes:,} ({published.name}){published.states}",
        tested(set(tiny)),
    )


def by_torch(config: ModelConfig) -> str:
    """What has no Triton kernel of its own."""
    parts = [] if config.delta is None else ["states of prompts and of drafts"]
    if config.norm is NormKind.CENTERED:
        parts.append("norms")
    if config.qk_norm is QkNorm.WHOLE:
        parts.append("norms of q and k")
    if config.query_scale is not None:
        parts.append("factor of q")
    if config.moe is not None:
        parts.append("choice of experts")
    return ", ".join(parts) or "–"


def tested(tiny: set[str]) -> str:
    """By the lists of paths that tiny checkpoints take."""
    if tiny & set(ALL_PATHS):
        return "all paths"
    if tiny & set(REDUCED_PATHS):
        return "reduced"
    added = [path for name in sorted(tiny) for path in ADDED_PATHS.get(name, ())]
    return f"layers, ranks; {'; '.join(dict.fromkeys(added))}" if added else "layers, ranks"


def page() -> str:
    """docs/models.md with the table."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or not after:
        sys.exit(f"{PAGE}: no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{chr(10).join(table())}\n{END}{after}"


def main(arguments: list[str]) -> int:
    transformers.logging.set_verbosity_error()
    missing = {family.name for family in FAMILIES} ^ PUBLISHED.keys()
    if missing:
        sys.exit(f"families without a row, or rows without a family: {', '.join(sorted(missing))}")
    wanted = page()
    if "--check" in arguments:
        return 0 if wanted == PAGE.read_text(encoding="utf-8") else 1
    sys.stdout.write(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
