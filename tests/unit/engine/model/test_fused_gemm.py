"""Compiled products are those of torch, and a row's does not depend on the others."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_engine.attention.vectors import PANEL, TILE_ROWS
from tandem_engine.model.fused.gemm import multiply, pack
from tandem_engine.model.fused.kernel import build_head_kernel
from tandem_testing.compiled_pieces import calling

add_product = calling(multiply)


def operands(rows: int, inputs: int, panels: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, inputs, generator=generator),
        torch.randn(panels * PANEL, inputs, generator=generator) / inputs**0.5,
    )


@settings(deadline=None)
@given(rows=st.integers(0, 3 * TILE_ROWS), inputs=st.integers(1, 70), panels=st.integers(1, 4), seed=st.integers(0, 99))
def test_a_product_is_that_of_torch(rows, inputs, panels, seed):
    x, weight = operands(rows, inputs, panels, seed)
    product = build_head_kernel()(x.numpy(), pack(weight))
    torch.testing.assert_close(torch.from_numpy(product), x @ weight.T, atol=1e-5, rtol=0)


@settings(deadline=None)
@given(rows=st.integers(1, 3 * TILE_ROWS), added=st.booleans())
def test_a_product_is_put_or_added(rows, added):
    x, weight = operands(rows, 48, 2)
    before = torch.randn(rows, len(weight))
    out = before.clone()
    add_product(x.numpy(), pack(weight), out.numpy(), added)
    torch.testing.assert_close(out, x @ weight.T + (before if added else 0), atol=1e-5, rtol=0)


@pytest.mark.parametrize("rows", range(1, 2 * TILE_ROWS + 4))
def test_a_row_has_the_same_bits_in_any_batch(rows):
    x, weight = operands(rows, 96, 3)
    head, panels = build_head_kernel(), pack(weight)
    together = head(x.numpy(), panels)
    alone = np.concatenate([head(x[row : row + 1].numpy(), panels) for row in range(rows)])
    assert np.array_equal(together, alone)


def test_numbers_that_are_none_stay_in_their_row():
    x, weight = operands(TILE_ROWS + 1, 32, 1)
    x[2] = torch.nan
    product = build_head_kernel()(x.numpy(), pack(weight))
    assert np.isnan(product).all(axis=1).tolist() == [row == 2 for row in range(len(x))]


def test_a_part_of_a_panel_is_refused():
    with pytest.raises(AssertionError, match="multiple"):
        pack(torch.zeros(PANEL + 1, 8))
