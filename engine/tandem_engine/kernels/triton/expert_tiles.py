"""Sizes of the tiles of `fused_moe`, by how many pairs of a token and an expert a step has for each expert.

    pairs of an expert     rows     what bounds the products            tile
    few (decodes)          64       reading weights                     few outputs: more programs, each with more
                                                                        blocks of weights in flight
    some                   64       both                                a square
    many (prompts)         128      multiplying                         as large as the registers of 8 warps

A row of any tile is summed in one order: steps of 16 inputs, from the first to the last, by the instruction of a warp
group that multiplies 64 rows at a time. Rows, outputs and stages of a tile do not change that order, so a token's
result is the same in any company. Tiles of 16 rows would be multiplied by another instruction, and are not used.

Large tiles need the shared memory of Hopper. float32, which is multiplied without tensor cores, has one tile.
"""

from typing import NamedTuple

import torch


class GemmTile(NamedTuple):
    """How a product is cut."""

    outputs: int
    depth: int
    num_warps: int
    num_stages: int


class ExpertTiles(NamedTuple):
    """Of both products of one step."""

    rows: int
    """Pairs of a block."""
    gate_up: GemmTile
    """Its outputs are those of gate, and as many of up."""
    down: GemmTile


FEW_PAIRS, MANY_PAIRS = 8, 48
"""Of an expert on average: up to the first tiles are small, above the second they are large."""

FEW = ExpertTiles(
    rows=64,
    gate_up=GemmTile(outputs=32, depth=64, num_warps=4, num_stages=4),
    down=GemmTile(outputs=64, depth=64, num_warps=4, num_stages=4),
)
SOME = ExpertTiles(
    rows=64,
    gate_up=GemmTile(outputs=64, depth=64, num_warps=4, num_stages=3),
    down=GemmTile(outputs=128, depth=64, num_warps=4, num_stages=3),
)
MANY = ExpertTiles(
    rows=128,
    gate_up=GemmTile(outputs=128, depth=64, num_warps=8, num_stages=4),
    down=GemmTile(outputs=256, depth=64, num_warps=8, num_stages=4),
)
LARGE_SHARED = 200 << 10
"""Bytes of shared memory of a block from which a device runs `FEW` and `MANY`."""


def expert_tiles(num_pairs: int, num_experts: int, dtype: torch.dtype, *, shared_bytes: int) -> ExpertTiles:
    """Of a step with so many pairs, for a device with so much shared memory for a block."""
    if dtype.itemsize > 2 or shared_bytes < LARGE_SHARED:
        return SOME
    if num_pairs <= FEW_PAIRS * num_experts:
        return FEW
    return SOME if num_pairs <= MANY_PAIRS * num_experts else MANY


def every_tile(dtype: torch.dtype, *, shared_bytes: int) -> tuple[ExpertTiles, ...]:
    """What `expert_tiles` can return for any number of pairs."""
    counts = (1, FEW_PAIRS + 1, MANY_PAIRS + 1)
    return tuple(dict.fromkeys(expert_tiles(pairs, 1, dtype, shared_bytes=shared_bytes) for pairs in counts))
