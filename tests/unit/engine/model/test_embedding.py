"""Rows of a table are the same wherever they are kept, and a large table is kept once."""

import gc

import pytest
import torch

from tandem_engine.model.layers import linear
from tandem_engine.model.layers.linear import (
    DenseTable,
    Embedding,
    Linear,
    PackedLinear,
    PanelTable,
    projection,
    table_of,
)

DTYPES = [torch.float32, torch.bfloat16]
VOCABULARY, HIDDEN = 300, 256


def shared_table(dtype: torch.dtype) -> tuple[PanelTable, torch.Tensor]:
    """A table that is the weight of a projection, and that weight."""
    weight = torch.randn(VOCABULARY, HIDDEN).to(dtype)
    scores = projection(weight)
    if not isinstance(scores, PackedLinear) or scores.few is None:
        pytest.skip("oneDNN keeps weights otherwise on this CPU")
    table = table_of(weight, scores)
    assert isinstance(table, PanelTable)
    return table, weight


@pytest.fixture
def shares_all(monkeypatch):
    monkeypatch.setattr(linear, "MIN_SHARED_BYTES", 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_from_panels_are_those_of_the_weight(shares_all, dtype):
    table, weight = shared_table(dtype)
    # The projection is gone: what remains of it is the table's.
    gc.collect()
    rows = torch.tensor([0, 299, 63, 64, 7, 7])
    found = Embedding(table=table)(rows)
    assert torch.equal(found, weight[rows])
    assert found.is_contiguous()
    assert len(table) == VOCABULARY
    assert table(torch.empty(0, dtype=torch.int64)).shape == (0, HIDDEN)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_fresh(shares_all, dtype):
    table, weight = shared_table(dtype)
    table(torch.tensor([5])).zero_()
    assert torch.equal(table(torch.tensor([5]))[0], weight[5])


@pytest.mark.parametrize("row", [-1, VOCABULARY, VOCABULARY + 19])
def test_rows_that_only_fill_a_panel_are_no_tokens(shares_all, row):
    table, _ = shared_table(torch.float32)
    with pytest.raises(IndexError, match="300 rows"):
        table(torch.tensor([3, row]))


def test_scale_is_a_factor_of_rows(shares_all):
    table, weight = shared_table(torch.float32)
    assert torch.equal(Embedding(table=table, scale=torch.tensor(3.0))(torch.tensor([9]))[0], weight[9] * 3.0)


def test_small_table_and_one_that_no_scores_share_stay_rows():
    weight = torch.randn(VOCABULARY, HIDDEN)
    for scores in (None, projection(weight), Linear(weight=weight, bias=None)):
        assert isinstance(table_of(weight, scores), DenseTable)
