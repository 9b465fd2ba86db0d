"""Rows of K and V as vector instructions, against numpy."""

import numpy as np
import pytest

from tandem_engine.kernels.cpu.attention_rows import build_row_pieces, fold, highest, weigh_row
from tandem_engine.kernels.cpu.pieces import compiled_kernel
from tandem_engine.kernels.cpu.vectors import LANES
from tandem_testing import cpu_kernel_reference as reference

ROOM = 2 * LANES
COUNT = LANES + 3
"""Rows: more than a vector, and no whole number of them."""
NOWHERE = 0
"""What is fetched ahead may be anywhere, where there is no memory too."""


@pytest.fixture
def dice():
    return np.random.default_rng(0)


@pytest.mark.parametrize("head_dim", [6, LANES, 2 * LANES + 4])
def test_scores_and_outputs_are_those_of_matrix_products(dice, head_dim):
    group = 3
    pieces = build_row_pieces(np.dtype(np.float32), head_dim, group)
    multiply, add = pieces.multiply, pieces.add

    @compiled_kernel
    def compute(queries, rows, count, sums, scores, out):
        multiply(queries.ctypes.data, rows.ctypes.data, count, sums.ctypes.data, sums.shape[1], NOWHERE)
        for head in range(queries.shape[0]):
            fold(sums[head].ctypes.data, count, np.float32(0.5), scores[head].ctypes.data)
        add(rows.ctypes.data, count, scores.ctypes.data, scores.shape[1], out.ctypes.data, out.shape[1], NOWHERE)

    queries = dice.standard_normal((group, head_dim), np.float32)
    rows = dice.standard_normal((COUNT, head_dim), np.float32)
    sums, scores = np.zeros((group, ROOM, LANES), np.float32), np.zeros((group, ROOM), np.float32)
    out = np.full((group, head_dim + 2), 7.0, np.float32)
    compute(queries, rows, COUNT, sums, scores, out)
    np.testing.assert_allclose(scores[:, :COUNT], reference.scores(queries, rows, 0.5), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        out[:, :head_dim], 7.0 + reference.outputs(scores[:, :COUNT], rows), rtol=1e-5, atol=1e-4
    )
    assert (out[:, head_dim:] == 7.0).all(), "written behind the outputs"


def test_weights_exclude_rows_after_the_last(dice):
    @compiled_kernel
    def compute(scores, count):
        most = highest(scores.ctypes.data, count)
        return most, weigh_row(scores.ctypes.data, count, most)

    scores = dice.standard_normal(ROOM, np.float32)
    scores[COUNT:] = 1e30
    (expected,), (maximum,), (expected_sum,) = reference.softmax_weights(scores[None, :COUNT])
    most, total = compute(weights := scores.copy(), COUNT)
    assert most == maximum
    np.testing.assert_allclose(weights[:COUNT], expected, rtol=1e-6)
    np.testing.assert_allclose(total, expected_sum, rtol=1e-6)


def test_score_that_is_no_number_makes_the_sum_none():
    @compiled_kernel
    def compute(scores, count):
        return weigh_row(scores.ctypes.data, count, highest(scores.ctypes.data, count))

    scores = np.zeros(ROOM, np.float32)
    scores[LANES] = np.nan
    assert np.isnan(compute(scores, COUNT))
