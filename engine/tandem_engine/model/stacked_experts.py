"""Checkpoints that store the experts of a layer together (gpt_oss, Llama 4), with an entry for each expert.

gpt_oss: gate and up are one matrix whose outputs alternate

    mlp.experts.gate_up_proj          [E, hidden, 2 · I]                    in the dtype: inputs first, unlike elsewhere
    mlp.experts.gate_up_proj_blocks   uint8 [E, 2 · I, hidden / 32, 16]     MXFP4, see `quantization.formats`
    mlp.experts.gate_up_proj_scales   uint8 [E, 2 · I, hidden / 32]
    mlp.experts.gate_up_proj_bias     [E, 2 · I]

and `down_proj` likewise, [E, I, hidden]. They become `mlp.experts.3.gate_up_proj.weight` [2 · I, hidden], `.bias`, or
`.blocks` and `.scales`, which `dequantized` puts together.

Llama 4:

    feed_forward.experts.gate_up_proj   [E, hidden, 2 · I]      inputs first, unlike elsewhere; gate before up
    feed_forward.experts.down_proj      [E, I, hidden]

They become `feed_forward.experts.3.gate_proj.weight` [I, hidden] and so on: the names that quantized checkpoints have.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from tandem_engine.model.checkpoint_files import ReadableTensor, StoredTensor, TransposedColumns
from tandem_engine.model.config_fields import MAX_EXPERTS

_GPT_OSS = re.compile(r"(?P<experts>.+\.mlp\.experts)\.(?P<name>gate_up_proj|down_proj)(?:_(?P<part>[a-z]+))?")
_GPT_OSS_RANKS = {None: 3, "blocks": 4, "scales": 3, "bias": 2}
_LLAMA4 = re.compile(r"(?P<experts>.+\.feed_forward\.experts)\.(?P<name>gate_up_proj|down_proj)")


def unstacked_gpt_oss(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """`tensors` with an entry for each expert, and the router under our name. What has an odd shape keeps its name."""
    result: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        match = _GPT_OSS.fullmatch(name)
        if match and len(tensor.shape) == _GPT_OSS_RANKS.get(match["part"]) and tensor.shape[0] <= MAX_EXPERTS:
            result.update(_unstack_gpt_oss(match["experts"], f"{match['name']}.{match['part'] or 'weight'}", tensor))
        else:
            result[name.replace(".mlp.router.", ".mlp.gate.")] = tensor
    return result


def _unstack_gpt_oss(experts: str, name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    count, *shape = tensor.shape
    size = tensor.size // count if count else 0
    for index in range(count):
        part = replace(tensor, shape=tuple(shape), offset=tensor.offset + index * size, size=size)
        yield f"{experts}.{index}.{name}", part


def outputs_first(tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
    """`tensors` with the plain matrices of `unstacked_gpt_oss` experts as other families have them."""
    return {
        name: TransposedColumns(name=name, stored=tensor, start=0, stop=tensor.shape[1])
        if isinstance(tensor, StoredTensor) and ".mlp.experts." in name and len(tensor.shape) == 2
        else tensor
        for name, tensor in tensors.items()
    }


def unstacked_llama4(tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
    """`tensors` with an entry for each projection of an expert. What has an odd shape keeps its name."""
    result: dict[str, ReadableTensor] = {}
    for name, tensor in tensors.items():
        match = _LLAMA4.fullmatch(name)
        if match and isinstance(tensor, StoredTensor) and len(tensor.shape) == 3 and tensor.shape[0] <= MAX_EXPERTS:
            result.update(_unstack_llama4(match["experts"], match["name"], tensor))
        else:
            result[name] = tensor
    return result


def _unstack_llama4(experts: str, name: str, tensor: StoredTensor) -> Iterator[tuple[str, ReadableTensor]]:
    count, inputs, outputs = tensor.shape
    projections = ("gate_proj", "up_proj") if name == "gate_up_proj" else ("down_proj",)
    width, size = outputs // len(projections), tensor.size // max(count, 1)
    for index in range(count):
        whole = replace(tensor, shape=(inputs, outputs), offset=tensor.offset + index * size, size=size)
        for place, projection in enumerate(projections):
            ours = f"{experts}.{index}.{projection}.weight"
            # An odd column of the last one shows in its shape.
            stop = outputs if place == len(projections) - 1 else (place + 1) * width
            yield ours, TransposedColumns(name=ours, stored=whole, start=place * width, stop=stop)
