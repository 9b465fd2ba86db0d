"""Llama 4: experts of a checkpoint, of which those of a layer are stored together.

    feed_forward.experts.gate_up_proj   [E, hidden, 2 · I]      inputs first, unlike elsewhere; gate before up
    feed_forward.experts.down_proj      [E, I, hidden]

Each becomes one entry per expert and projection, `feed_forward.experts.3.gate_proj.weight` [I, hidden] and so on: the
names that quantized checkpoints have.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from tandem_engine.model.checkpoint_files import ReadableTensor, StoredTensor, TransposedColumns
from tandem_engine.model.config_fields import MAX_EXPERTS

_STACKED = re.compile(r"(?P<experts>.+\.feed_forward\.experts)\.(?P<name>gate_up_proj|down_proj)")


def unstacked_experts(tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
    """`tensors` with an entry for each projection of an expert. What has an odd shape keeps its name."""
    result: dict[str, ReadableTensor] = {}
    for name, tensor in tensors.items():
        match = _STACKED.fullmatch(name)
        if match and isinstance(tensor, StoredTensor) and len(tensor.shape) == 3 and tensor.shape[0] <= MAX_EXPERTS:
            result.update(_unstack(match["experts"], match["name"], tensor))
        else:
            result[name] = tensor
    return result


def _unstack(experts: str, name: str, tensor: StoredTensor) -> Iterator[tuple[str, ReadableTensor]]:
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
