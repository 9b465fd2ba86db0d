"""Outputs of a layer with states: which of an adapter's rows of B a rank has, and where they stand among its own.

ours, of a rank      [q | k | v | z] of its heads, then [b | a]
Qwen3-Next           in_proj_qkvz and in_proj_ba, of one key head after the other
Qwen3.5              in_proj_qkv, _z, _b and _a
"""

import torch
from torch import Tensor

from tandem_engine.config import DeltaConfig
from tandem_engine.model.layers.delta import DeltaHeads
from tandem_engine.model.recurrent.blocks import heads_of_states, joined_sizes, order_by_part


def recurrent_rows(projection: str, delta: DeltaConfig, *, rank: int, size: int) -> tuple[slice, Tensor]:
    """Of `projection`, such as `linear_attn.in_proj_z`, on `rank` of `size`: outputs of the site, and rows of B."""
    heads = heads_of_states(delta, size)
    name = projection.removeprefix("linear_attn.in_proj_")
    first, length = _places(heads)[name]
    return slice(first, first + length), _rows(name, heads, rank=rank, size=size)


def _places(heads: DeltaHeads) -> dict[str, tuple[int, int]]:
    """First output and number of outputs, by the ends of names."""
    convolved = 2 * heads.key_width + heads.value_width
    rates = convolved + heads.value_width
    return {
        "qkvz": (0, rates),
        "qkv": (0, convolved),
        "z": (convolved, heads.value_width),
        "ba": (rates, 2 * heads.values),
        "b": (rates, heads.values),
        "a": (rates + heads.values, heads.values),
    }


def _rows(name: str, heads: DeltaHeads, *, rank: int, size: int) -> Tensor:
    inputs, rates = joined_sizes(heads)
    grouped = {"qkvz": inputs, "ba": rates}.get(name)
    if grouped is not None:
        return rank * heads.keys * sum(grouped) + order_by_part(heads.keys, grouped)
    widths = {"qkv": (heads.key_width, heads.key_width, heads.value_width), "z": (heads.value_width,)}
    found, first = [], 0
    for width in widths.get(name, (heads.values,)):
        found.append(torch.arange(first + rank * width, first + (rank + 1) * width))
        first += size * width
    return torch.cat(found)
