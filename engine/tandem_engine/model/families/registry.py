"""The table of model families: how each one's config.json becomes a `ModelConfig`.

All supported families are the same decoder (`model.decoder`): blocks of attention with rotary positions and a gated
feed-forward part or experts. A family is the reading of its differences from config.json, in the other modules here and
in `model.latent.families`. `known_fields` has what a family is, and fields that many of them read alike.
"""

from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.families.dense import DENSE_FAMILIES
from tandem_engine.model.families.experts import EXPERT_FAMILIES, MIXTRAL
from tandem_engine.model.families.gemma import GEMMA2, GEMMA3
from tandem_engine.model.families.gemma4 import GEMMA4
from tandem_engine.model.families.gpt_oss import GPT_OSS
from tandem_engine.model.families.llama4 import LLAMA4
from tandem_engine.model.families.norms import NORM_FAMILIES
from tandem_engine.model.families.plain import LLAMA, MISTRAL, QWEN2, QWEN3
from tandem_engine.model.families.recurrent import RECURRENT_FAMILIES
from tandem_engine.model.known_fields import Family
from tandem_engine.model.latent.families import LATENT_FAMILIES

FAMILIES = (
    *(LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, GEMMA4, GPT_OSS, LLAMA4),
    *EXPERT_FAMILIES,
    *NORM_FAMILIES,
    *DENSE_FAMILIES,
    *LATENT_FAMILIES,
    *RECURRENT_FAMILIES,
)


def find_family(config: ConfigFields) -> Family | None:
    """The family that `architectures` names. `auto_map`, which points at code to run, is never looked at.

    Raises:
        CheckpointError: `model_type`, by which transformers chooses a model, names another one.
    """
    architectures = config.items("architectures")
    named = [family for family in FAMILIES if family.architecture in architectures]
    if not named:
        return None
    model_type = config.values.get("model_type")
    family = next((each for each in named if model_type in (None, each.name, *each.other_names)), None)
    if family is None:
        config.refuse(
            "model_type",
            f"must be {named[0].name}, as architectures names {named[0].architecture}; correct the one that is wrong",
        )
    return family


def require_family(config: ConfigFields) -> Family:
    """As `find_family`. Raises `CheckpointError` when there is none."""
    family = find_family(config)
    if family is None:
        supported = ", ".join(family.architecture for family in FAMILIES)
        config.refuse("architectures", f"must name a supported architecture ({supported})")
    return family
