"""The model families that can be served. A new one is a file beside `llama.py` and a line here."""

from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.family import Family
from tandem_engine.model.llama import LLAMA
from tandem_engine.model.qwen2 import QWEN2
from tandem_engine.model.qwen3 import QWEN3

FAMILIES = (LLAMA, QWEN2, QWEN3)


def find_family(config: ConfigFields) -> Family:
    """The family that `architectures` names. `auto_map`, which points at code to run, is never looked at.

    Raises:
        CheckpointError: none of them is supported.
    """
    architectures = config.items("architectures")
    known = [family for family in FAMILIES if family.architecture in architectures]
    if not known:
        supported = ", ".join(family.architecture for family in FAMILIES)
        config.refuse("architectures", f"must name a supported architecture ({supported})")
    return known[0]
