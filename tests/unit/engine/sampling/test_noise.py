import math

import pytest
import torch

from tandem_engine.sampling.sampler import gumbel, token_hashes


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


HASHES = token_hashes(torch.arange(20_000))


def test_noise_is_a_function_of_seed_position_and_token_alone():
    rows = gumbel(ints(7, 8, 7), ints(100, 100, 101), HASHES)
    assert torch.equal(gumbel(ints(8), ints(100), HASHES)[0], rows[1])
    ids = ints(19_999, 3, 500)[None]
    assert torch.equal(gumbel(ints(7), ints(101), HASHES[ids])[0], rows[2][ids[0]])


def test_noise_follows_the_gumbel_distribution():
    noise = gumbel(torch.arange(50), ints(*[9] * 50), HASHES).double().flatten()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.005)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    for x in (-1.0, 0.0, 1.0, 3.0, 6.0):
        assert (noise < x).double().mean().item() == pytest.approx(math.exp(-math.exp(-x)), abs=0.002)


@pytest.mark.parametrize(
    ("seeds", "positions"),
    [((1, 2), (5, 5)), ((1, 1), (5, 6)), ((5, 6), (6, 5)), ((0, -1), (0, 0)), ((0, 1 << 32), (1, 1))],
)
def test_other_seeds_and_positions_are_independent(seeds, positions):
    one, other = gumbel(ints(*seeds), ints(*positions), HASHES)
    correlation = torch.corrcoef(torch.stack([one, other]))[0, 1].abs().item()
    assert correlation < 5 / math.sqrt(len(HASHES))


def test_every_seed_gives_finite_noise_in_the_documented_range():
    seeds = ints(-(2**63), 2**63 - 1, -1, 0, 1)
    noise = gumbel(seeds, ints(0, 2**31, 0, 2**40, 1), HASHES)
    assert noise.isfinite().all()
    assert noise.min().item() > -2.9
    assert noise.max().item() < 22.2
