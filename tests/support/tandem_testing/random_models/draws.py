"""The table of draws: a random model of each family of docs/models.md, and of models that transformers computes."""

from random import Random

from tandem_testing.random_models import dense, experts
from tandem_testing.random_models.through_transformers import PLAIN, WITH_STATES
from tandem_testing.random_models.towers import TOWERS, Draw
from tandem_testing.tiny_checkpoints import TinyModel

NATIVE: dict[str, Draw] = {
    "llama": dense.llama,
    "mistral": dense.mistral,
    "mixtral": experts.mixtral,
    "qwen2": dense.qwen2,
    "qwen3": dense.qwen3,
    "gemma2": dense.gemma2,
    "gemma3_text": dense.gemma3,
    "gemma4_text": dense.gemma4,
    "gpt_oss": experts.gpt_oss,
    "llama4_text": experts.llama4,
    "qwen3_moe": experts.qwen3_moe,
    "qwen2_moe": experts.qwen2_moe,
    "glm4_moe": experts.glm4_moe,
    "ernie4_5_moe": experts.ernie_moe,
    "hunyuan_v1_moe": experts.hunyuan_moe,
    "minimax_m2": experts.minimax_m2,
    "olmo2": dense.olmo2,
    "olmo3": dense.olmo3,
    "exaone4": dense.exaone4,
    "glm4": dense.glm4,
    "cohere2": dense.cohere2,
    "phi3": dense.phi3,
    "granite": dense.granite,
    "smollm3": dense.smollm3,
    "seed_oss": dense.seed_oss,
    "ernie4_5": dense.ernie,
    "hunyuan_v1_dense": dense.hunyuan,
    "ministral3": dense.ministral3,
    "deepseek_v2": experts.deepseek_v2,
    "deepseek_v3": experts.deepseek_v3,
    "glm4_moe_lite": experts.glm4_moe_lite,
    "qwen3_next": experts.qwen3_next,
    "qwen3_5_text": experts.qwen3_5,
    "qwen3_5_moe_text": experts.qwen3_5_moe,
}
DRAWS: dict[str, Draw] = {**NATIVE, **TOWERS, **PLAIN, **WITH_STATES}


def draw(family: str, seed: int) -> TinyModel:
    """The same model for the same family and seed, in every process."""
    return DRAWS[family](Random(f"{family} {seed}"))
