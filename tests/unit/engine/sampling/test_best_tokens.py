"""The best token of a row is the one that torch finds."""

import pytest
import torch

from tandem_engine.kernels.cpu.first_places import BLOCK
from tandem_engine.sampling.sampler import best_tokens
from tandem_testing import cpu_kernel_reference as reference


@pytest.mark.parametrize("size", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])
def test_best_token_equals_torch_argmax(size):
    logits = torch.randn(9, size, generator=torch.Generator().manual_seed(size))
    best, token_ids = best_tokens(logits)
    expected, places = logits.max(dim=1)
    assert torch.equal(best, expected)
    assert torch.equal(token_ids, places)
    assert token_ids.tolist() == reference.first_places(logits.numpy()).tolist()


@pytest.mark.parametrize("places", [(0, 5), (3, BLOCK), (BLOCK - 1, BLOCK), (BLOCK, 2 * BLOCK + 1)])
def test_first_of_equal_logits_is_best(places):
    logits = torch.zeros(1, 3 * BLOCK)
    logits[0, list(places)] = 2.0
    assert best_tokens(logits)[1].tolist() == [places[0]]


def test_zeros_of_both_signs_are_equal():
    assert best_tokens(torch.tensor([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]]))[1].tolist() == [1, 1]


def test_row_of_which_all_is_forbidden_has_its_first_token():
    best, token_ids = best_tokens(torch.full((1, BLOCK + 3), -torch.inf))
    assert (best.tolist(), token_ids.tolist()) == ([-torch.inf], [0])


@pytest.mark.parametrize("place", [0, 7, BLOCK + 1])
def test_nan_counts_as_the_largest_and_disturbs_no_other_row(place):
    logits = torch.randn(3, 2 * BLOCK, generator=torch.Generator().manual_seed(1))
    expected = logits.argmax(dim=1)
    logits[1, place] = torch.nan
    best, token_ids = best_tokens(logits)
    assert best.isnan().tolist() == [False, True, False]
    assert token_ids[[0, 2]].tolist() == expected[[0, 2]].tolist()
    assert 0 <= int(token_ids[1]) < 2 * BLOCK


def test_rows_need_not_be_dense():
    wide = torch.randn(4, 40, generator=torch.Generator().manual_seed(2))
    for logits in (wide[:, ::2], wide[:1].expand(3, -1)):
        assert torch.equal(best_tokens(logits)[1], logits.max(dim=1).indices)
