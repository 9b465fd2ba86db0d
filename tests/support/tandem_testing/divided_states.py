"""States of a model whose key heads ranks divide: those of each rank, empty or with its heads of a whole one."""

import torch

from tandem_engine.memory.state_pool import StatePool, StateSpec

KEY_HEADS, VALUES, KEY, VALUE = 4, 3, 12, 20
"""Heads of the model, value heads of each, and their sizes."""


def spec_of(ranks: int) -> StateSpec:
    """What each of `ranks` keeps."""
    keys = KEY_HEADS // ranks
    return StateSpec(
        layers=3,
        history=2,
        channels=keys * (2 * KEY + VALUES * VALUE),
        heads=keys * VALUES,
        key_size=KEY,
        value_size=VALUE,
        dtype=torch.bfloat16,
    )


def whole_states() -> StatePool:
    """Of one rank, with random bytes."""
    [pool] = divided_states(1)
    pool.bytes_view().random_(0, 255)
    return pool


def divided_states(ranks: int, whole: StatePool | None = None) -> list[StatePool]:
    """One pool per rank: empty, or with its heads of `whole`."""
    pools = [StatePool(spec_of(ranks), rows=3, device="cpu") for _ in range(ranks)]
    if whole is not None:
        widths = (KEY_HEADS * KEY, KEY_HEADS * KEY, KEY_HEADS * VALUES * VALUE)
        for rank, pool in enumerate(pools):
            pool.matrices.copy_(whole.matrices.chunk(ranks, dim=2)[rank])
            parts = whole.inputs.split(widths, dim=-1)
            pool.inputs.copy_(torch.cat([part.chunk(ranks, dim=-1)[rank] for part in parts], dim=-1))
    return pools
