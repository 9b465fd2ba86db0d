"""Packed masks on logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_engine.forward import batch
from tandem_engine.forward.batch import MasksLateError, TokenMasks
from tandem_engine.sampling.logits_processor import apply_masks
from tandem_testing.toy_grammar import make_masks


def masked(logits: torch.Tensor, masks: TokenMasks) -> torch.Tensor:
    logits = logits.clone()
    apply_masks(logits, masks)
    return logits


@settings(max_examples=60, deadline=None)
@given(data=st.data(), vocab_size=st.integers(1, 100), num_rows=st.integers(1, 5))
def test_mask_forbids_tokens_in_its_row_only(data, vocab_size, num_rows):  # [mask-per-row]
    masked_rows = data.draw(st.lists(st.integers(0, num_rows - 1), unique=True, min_size=1))
    allowed = {row: data.draw(st.sets(st.integers(0, vocab_size - 1))) for row in masked_rows}
    before = torch.randn(num_rows, vocab_size)
    result = masked(before, make_masks(allowed, words=-(-vocab_size // 32)))
    for row in range(num_rows):
        for token in range(vocab_size):
            forbidden = row in allowed and token not in allowed[row]
            assert result[row, token] == (-torch.inf if forbidden else before[row, token])


def test_logits_beyond_the_mask_are_forbidden():
    result = masked(torch.zeros(1, 40), make_masks({0: {3, 31}}, words=1))
    assert (result[0] == 0).nonzero().flatten().tolist() == [3, 31]


def test_mask_wider_than_the_logits_is_cut():
    result = masked(torch.zeros(1, 33), make_masks({0: {32, 50}}, words=2))
    assert (result[0] == 0).nonzero().flatten().tolist() == [32]


def test_masks_forbid_nothing_until_they_are_filled():
    masks = TokenMasks.open((0, 1), words=3)
    masks.release()
    assert torch.equal(masked(torch.zeros(2, 90), masks), torch.zeros(2, 90))


def test_missing_masks_are_an_error_and_not_a_hang(monkeypatch):
    monkeypatch.setattr(batch, "MAX_WAIT", 0.01)
    with pytest.raises(MasksLateError, match="were not filled"):
        apply_masks(torch.zeros(1, 8), TokenMasks.open((0,), words=1))
