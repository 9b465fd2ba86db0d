"""gpt_oss: the tensors of its checkpoints under our names.

Experts of a layer are stored together, their gate and up as one matrix whose outputs alternate:

    mlp.experts.gate_up_proj          [E, hidden, 2 · I]                    in the dtype: inputs first, unlike elsewhere
    mlp.experts.gate_up_proj_blocks   uint8 [E, 2 · I, hidden / 32, 16]     MXFP4, see `quantization.formats`
    mlp.experts.gate_up_proj_scales   uint8 [E, 2 · I, hidden / 32]
    mlp.experts.gate_up_proj_bias     [E, 2 · I]

and `down_proj` likewise, [E, I, hidden]. Each becomes one entry per expert: `mlp.experts.3.gate_up_proj.weight` [2 · I,
hidden], `.bias`, or `.blocks` and `.scales`, which `dequantized` puts together.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from tandem_engine.model.checkpoint_files import ReadableTensor, StoredTensor, TransposedColumns
from tandem_engine.model.config_fields import MAX_EXPERTS

_EXPERTS = re.compile(r"(?P<experts>.+\.mlp\.experts)\.(?P<name>gate_up_proj|down_proj)(?:_(?P<part>[a-z]+))?")
_RANKS = {None: 3, "blocks": 4, "scales": 3, "bias": 2}


def unstacked(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """`tensors` with an entry for each expert, and the router under our name. What has an odd shape keeps its name."""
    result: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        match = _EXPERTS.fullmatch(name)
        if match and len(tensor.shape) == _RANKS.get(match["part"]) and tensor.shape[0] <= MAX_EXPERTS:
            result.update(_unstack(match["experts"], f"{match['name']}.{match['part'] or 'weight'}", tensor))
        else:
            result[name.replace(".mlp.router.", ".mlp.gate.")] = tensor
    return result


def _unstack(experts: str, name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    count, *shape = tensor.shape
    size = tensor.size // count if count else 0
    for index in range(count):
        part = replace(tensor, shape=tuple(shape), offset=tensor.offset + index * size, size=size)
        yield f"{experts}.{index}.{name}", part


def outputs_first(tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
    """`tensors` with the plain matrices of `unstacked` experts as other families have them."""
    return {
        name: TransposedColumns(name=name, stored=tensor, start=0, stop=tensor.shape[1])
        if isinstance(tensor, StoredTensor) and ".mlp.experts." in name and len(tensor.shape) == 2
        else tensor
        for name, tensor in tensors.items()
    }
