"""config.json as published files have it, next to how transformers 5 writes it.

Published files have `rope_theta`, `rope_scaling` and `torch_dtype`. In place of these transformers 5 writes
`rope_parameters` and `dtype`; it reads both spellings.
"""

import json
from pathlib import Path
from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
AT_THE_TOP = ("rope_theta", "partial_rotary_factor")
"""Rotary parameters that published files have beside `rope_scaling`."""
LOCAL_THETA = {"gemma3_text": "rope_local_base_freq"}
"""Families whose layers with a window have a base of their own, and its field."""


def spell_as_published(checkpoint: Path) -> Path:
    """Rewrite config.json of a model of text."""
    file = checkpoint / "config.json"
    file.write_text(json.dumps(as_published(json.loads(file.read_text())), indent=1))
    return checkpoint


def as_published(values: dict[str, Any]) -> dict[str, Any]:
    """The same config in the older spelling; as it is, where the family has none."""
    published = dict(values)
    if "dtype" in published:
        published["torch_dtype"] = published.pop("dtype")
    parameters = published.get("rope_parameters")
    if not isinstance(parameters, dict):
        return published
    if FULL not in parameters and SLIDING not in parameters:
        del published["rope_parameters"]
        return published | _flat(parameters)
    local = LOCAL_THETA.get(str(values.get("model_type")))
    if local is None:
        return published
    del published["rope_parameters"]
    return published | _flat(parameters[FULL]) | {local: parameters[SLIDING]["rope_theta"]}


def _flat(parameters: dict[str, Any]) -> dict[str, Any]:
    top = {name: parameters[name] for name in AT_THE_TOP if parameters.get(name) is not None}
    scaling = {name: value for name, value in parameters.items() if name not in AT_THE_TOP and value is not None}
    return {**top, "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling}
