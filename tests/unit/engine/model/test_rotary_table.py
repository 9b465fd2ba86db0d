"""Rotation is a pure function of a token's own position; keys in shared pages depend on it."""

import pytest
import torch

from tandem_engine.config import RopeConfig
from tandem_engine.model.layers.attention import RotaryTable, rotary_table

ROPES = [
    RopeConfig(),
    RopeConfig(rope_type="linear", factor=4.0),
    RopeConfig(rope_type="dynamic", factor=4.0, original_max_position=32),
    RopeConfig(rope_type="llama3", factor=8.0, original_max_position=32),
    RopeConfig(rope_type="yarn", factor=4.0, original_max_position=32),
]


def table(rope: RopeConfig, *, positions: int = 128, dtype: torch.dtype = torch.float32) -> RotaryTable:
    return rotary_table(rope, head_dim=16, positions=positions, dtype=dtype, device=torch.device("cpu"))


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.rope_type)
def test_longer_table_agrees_with_a_shorter_one(rope):
    assert torch.equal(table(rope, positions=128).angles[:40], table(rope, positions=40).angles)


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.rope_type)
def test_token_rotation_is_independent_of_batch(rope):
    rotary, x = table(rope), torch.randn(6, 3, 16)
    positions = torch.tensor([0, 31, 32, 33, 100, 127])
    together = rotary.at(positions).apply(x)
    alone = [rotary.at(positions[i : i + 1]).apply(x[i : i + 1]) for i in range(6)]
    assert torch.equal(together, torch.cat(alone))


def test_rotation_is_the_textbook_one():
    angle = torch.tensor([5.0])[:, None] * 10000.0 ** (-torch.arange(8) / 8)
    x = torch.randn(1, 2, 16)
    expected = torch.polar(torch.ones_like(angle), angle) * torch.complex(x[..., :8], x[..., 8:])
    rotated = table(RopeConfig()).at(torch.tensor([5])).apply(x)
    torch.testing.assert_close(rotated, torch.cat((expected.real, expected.imag), dim=-1))


def test_scores_depend_on_distance_alone():
    rotary, q, k = table(RopeConfig()), torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(query_at: int, key_at: int) -> torch.Tensor:
        rotated_q, rotated_k = rotary.at(torch.tensor([query_at])), rotary.at(torch.tensor([key_at]))
        return (rotated_q.apply(q) * rotated_k.apply(k)).sum()

    torch.testing.assert_close(score(20, 13), score(97, 90), atol=1e-4, rtol=0)


def test_dynamic_scaling_changes_nothing_within_its_context():
    assert torch.equal(table(ROPES[2]).angles[:32], table(RopeConfig()).angles[:32])


def test_angles_are_computed_in_float32_and_rounded_once():
    assert torch.equal(table(RopeConfig(), dtype=torch.bfloat16).angles, table(RopeConfig()).angles.bfloat16())


def test_position_beyond_the_table_is_an_error_not_garbage():
    with pytest.raises(IndexError):
        table(RopeConfig(), positions=8).at(torch.tensor([8]))
