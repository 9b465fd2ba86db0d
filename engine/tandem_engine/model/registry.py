"""The model families that Tandem computes itself. A new one is a file under `families` and a line here."""

from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.families.gemma2 import GEMMA2
from tandem_engine.model.families.gemma3 import GEMMA3
from tandem_engine.model.families.llama import LLAMA
from tandem_engine.model.families.mistral import MISTRAL
from tandem_engine.model.families.mixtral import MIXTRAL
from tandem_engine.model.families.qwen2 import QWEN2
from tandem_engine.model.families.qwen3 import QWEN3
from tandem_engine.model.families.qwen3_moe import QWEN3_MOE
from tandem_engine.model.family import Family

FAMILIES = (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA2, GEMMA3)


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
    family = next((family for family in named if model_type is None or family.name == model_type), None)
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
