"""Perplexity, KL divergence and agreement by their definitions."""

import math

import pytest
import torch

from tandem_lab.accuracy import Divergence, kept


def logits(*shares):
    return torch.tensor(shares).log()


def test_model_does_not_diverge_from_itself():
    mine = logits([0.5, 0.25, 0.25], [0.1, 0.8, 0.1]) + 3.0  # logits of any height
    found = Divergence()
    found.add(kept(mine), mine, torch.tensor([0, 1]))
    assert found.mean_kl == pytest.approx(0.0, abs=1e-7)
    assert found.agreement == 1.0
    assert found.perplexity == pytest.approx(1 / math.sqrt(0.5 * 0.8))


def test_places_add_up_over_chunks():
    baseline, other = logits([0.5, 0.5], [0.9, 0.1], [0.2, 0.8]), logits([0.75, 0.25], [0.4, 0.6], [0.2, 0.8])
    found, targets = Divergence(), torch.tensor([0, 0, 1])
    for part in (slice(0, 1), slice(1, 3)):
        found.add(kept(baseline[part]), other[part], targets[part])
    first = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    second = 0.9 * math.log(0.9 / 0.4) + 0.1 * math.log(0.1 / 0.6)
    assert found.places == 3
    assert found.mean_kl == pytest.approx((first + second) / 3, rel=1e-5)
    assert found.largest_kl == pytest.approx(second, rel=1e-5)
    assert found.agreement == pytest.approx(2 / 3)
    assert found.perplexity == pytest.approx((0.75 * 0.4 * 0.8) ** (-1 / 3), rel=1e-5)


def test_token_that_the_baseline_excludes_adds_nothing():
    found = Divergence()
    found.add(kept(torch.tensor([[0.0, -torch.inf]])), torch.tensor([[0.0, 0.0]]), torch.tensor([0]))
    assert found.mean_kl == pytest.approx(math.log(2))
