"""One naming for the experts of a layer, whichever a checkpoint has.

    published Mixtral      block_sparse_moe.gate.weight, block_sparse_moe.experts.3.{w1,w3,w2}.weight
    published Qwen3-MoE    mlp.gate.weight, mlp.experts.3.{gate_proj,up_proj,down_proj}.weight
    transformers 5         mlp.gate.weight, mlp.experts.gate_up_proj [E, 2·I, hidden], mlp.experts.down_proj
                           [E, hidden, I]: how it holds them in memory, and writes them when told to save as is

The second is ours. A stacked tensor becomes one entry per expert and projection, each a range of the same
file: experts then are loaded, checked, sharded and fingerprinted like any other matrix.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from tandem_engine.model.expert_fields import MAX_EXPERTS
from tandem_engine.model.safetensors_file import ReadableTensor, StoredTensor

ROUTER = "mlp.gate.weight"
_MIXTRAL = ".block_sparse_moe."
_MIXTRAL_PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_STACKED = re.compile(r"(?P<experts>.+\.mlp\.experts)\.(?P<name>gate_up_proj|down_proj)")


def expert_name(expert: int, projection: str) -> str:
    """Name within its layer of `gate_proj`, `up_proj` or `down_proj` of one expert."""
    return f"mlp.experts.{expert}.{projection}.weight"


def canonical_experts(tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
    """`tensors` with experts under our names. What is no expert, or has an odd shape, keeps its name."""
    result: dict[str, ReadableTensor] = {}
    for name, tensor in tensors.items():
        stacked = _STACKED.fullmatch(name)
        if stacked and isinstance(tensor, StoredTensor) and _can_unstack(stacked["name"], tensor.shape):
            result.update(_unstack(stacked["experts"], stacked["name"], tensor))
        else:
            result[_renamed(name)] = tensor
    return result


def _renamed(name: str) -> str:
    if _MIXTRAL not in name:
        return name
    parts = name.replace(_MIXTRAL, ".mlp.").split(".")
    return ".".join(_MIXTRAL_PROJECTIONS.get(part, part) for part in parts)


def _projections(name: str) -> tuple[str, ...]:
    return ("gate_proj", "up_proj") if name == "gate_up_proj" else ("down_proj",)


def _can_unstack(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[0] <= MAX_EXPERTS and shape[1] % len(_projections(name)) == 0


def _unstack(experts: str, name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """Rows of an expert follow each other in the file, those of its gate before those of its up projection."""
    projections = _projections(name)
    count, rows, columns = tensor.shape
    shape = (rows // len(projections), columns)
    size = shape[0] * columns * tensor.dtype.itemsize
    for index in range(count):
        for place, projection in enumerate(projections):
            offset = tensor.offset + (index * len(projections) + place) * size
            yield (
                f"{experts}.{index}.{projection}.weight",
                replace(tensor, shape=shape, offset=offset, size=size),
            )
