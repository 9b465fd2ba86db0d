"""Pieces of CPU kernels, each compared with plain numpy (`tandem_testing.cpu_kernel_reference`)."""

import numpy as np
import numpy.typing as npt
import pytest

from tandem_engine.kernels.cpu.attention_work import END_TASK, merge_query
from tandem_engine.kernels.cpu.row_ops import build_head_pieces, norm_rows, silu_and_multiply
from tandem_engine.kernels.cpu.softmax import LOG2_E, bound, hide, pair_up, weigh
from tandem_engine.kernels.cpu.vectors import PANEL, pair_rows, product
from tandem_testing import cpu_kernel_reference as reference
from tandem_testing.compiled_pieces import calling

KEYS, HEAD_DIM = 7, 24
EPS = np.float32(1e-6)
FORMS = pytest.mark.parametrize("bfloat16", [False, True], ids=["float32", "bfloat16"])

Floats = npt.NDArray[np.float32]


@pytest.fixture
def dice() -> np.random.Generator:
    return np.random.default_rng(0)


def random(dice: np.random.Generator, *shape: int, bfloat16: bool = False) -> Floats:
    numbers = dice.standard_normal(shape, np.float32)
    return reference.from_bfloat16(reference.bfloat16_bits(numbers)) if bfloat16 else numbers


def stored(numbers: Floats, *, bfloat16: bool) -> npt.NDArray[np.uint16] | Floats:
    """Numbers as an array of the model's dtype."""
    return reference.bfloat16_bits(numbers) if bfloat16 else numbers


def require_close(found: npt.NDArray[np.uint16] | Floats, expected: npt.NDArray[np.float64], *, bfloat16: bool) -> None:
    numbers = reference.from_bfloat16(found) if found.dtype == np.uint16 else found
    # One rounding to bfloat16 may differ where float32 and float64 lie on two sides of a tie.
    np.testing.assert_allclose(numbers, expected, rtol=2**-7 if bfloat16 else 1e-5, atol=1e-5)


def test_hide_scores_outside_bounds_equal_minus_infinity(dice: np.random.Generator) -> None:
    scores, position = random(dice, KEYS, PANEL), 10
    first, end = (dice.integers(8, 20, PANEL).astype(np.int32) for _ in range(2))
    expected = reference.visible(scores.T, position + np.arange(KEYS), first, end).T
    calling(hide)(scores.ctypes.data, KEYS, position, first.ctypes.data, end.ctypes.data)
    np.testing.assert_array_equal(scores, expected.astype(np.float32))
    assert 0 < np.isneginf(expected).sum() < expected.size


def test_bound_scores_equal_capped_scores_in_powers_of_two(dice: np.random.Generator) -> None:
    scores, cap = 5 * random(dice, KEYS, PANEL), np.float32(2.0)
    expected = LOG2_E * reference.capped(0.5 * scores, cap)
    calling(bound)(scores.ctypes.data, KEYS, cap, np.float32(0.5) / cap)
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)


def test_weigh_two_blocks_equals_one_softmax(dice: np.random.Generator) -> None:
    scores = random(dice, 2, KEYS, PANEL)
    scores[:, :, 3] = -np.inf
    weights, highest, sums = reference.softmax_weights(np.concatenate(scores).T)
    maximum, total, factor = (
        np.full(PANEL, -np.inf, np.float32),
        np.zeros(PANEL, np.float32),
        np.empty(PANEL, np.float32),
    )
    run = calling(weigh)
    for block in scores:
        addresses = (each.ctypes.data for each in (maximum, total, factor))
        run(block.ctypes.data, KEYS, *addresses, np.float32(LOG2_E))
    scores[0] *= factor
    np.testing.assert_array_equal(maximum, highest.astype(np.float32))
    np.testing.assert_allclose(total, sums, rtol=1e-5)
    np.testing.assert_allclose(np.concatenate(scores).T, weights, rtol=1e-5, atol=1e-7)
    assert total[3] == 0.0


@pytest.mark.parametrize("keys", [KEYS - 1, KEYS])
def test_pair_up_weights_equal_pairs_of_nearest_bfloat16(dice: np.random.Generator, keys: int) -> None:
    weights = random(dice, keys + 1, PANEL)
    weights[keys:] = 0.0
    even, odd = (reference.bfloat16_bits(weights[side : keys + keys % 2 : 2]) for side in (0, 1))
    calling(pair_up)(weights.ctypes.data, keys)
    np.testing.assert_array_equal(weights.view(np.uint32)[: len(even)], reference.pairs(even, odd))


def test_pair_rows_of_any_length_equal_pairs(dice: np.random.Generator) -> None:
    first, second = (dice.integers(0, 2**16, PANEL + 5).astype(np.uint16) for _ in range(2))
    words = np.full(PANEL + 6, 7, np.uint32)
    calling(pair_rows)(first.ctypes.data, second.ctypes.data, words.ctypes.data, PANEL + 5)
    np.testing.assert_array_equal(words[:-1], reference.pairs(first, second))
    assert words[-1] == 7


def test_panel_product_on_earlier_sums_equals_reference(dice: np.random.Generator) -> None:
    rows, depth = 11, 9
    x, panel, out = random(dice, rows, depth), random(dice, depth, PANEL), random(dice, rows, PANEL)
    factor = random(dice, PANEL)
    expected = reference.product(x, panel.T) + out * factor.astype(np.float64)
    addresses = [each.ctypes.data for each in (panel, out, factor)]
    calling(product)(x.ctypes.data, depth, 1, addresses[0], addresses[1], PANEL, rows, depth, addresses[2])
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@FORMS
def test_norm_rows_equals_reference(dice: np.random.Generator, bfloat16: bool) -> None:
    rows, weight = random(dice, 3, HEAD_DIM, bfloat16=bfloat16), random(dice, HEAD_DIM, bfloat16=bfloat16)
    out = np.empty(rows.shape, np.uint16 if bfloat16 else np.float32)
    calling(norm_rows)(rows, weight, EPS, out)
    require_close(out, reference.norm(rows, weight, EPS, bfloat16=bfloat16), bfloat16=bfloat16)


@FORMS
@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
def test_normed_and_turned_head_equals_reference(dice: np.random.Generator, bfloat16: bool, narrow: bool) -> None:
    head, weight, angles = (
        random(dice, *shape, bfloat16=bfloat16) for shape in ((HEAD_DIM,), (HEAD_DIM,), (2, HEAD_DIM))
    )
    pieces = build_head_pieces(np.dtype(np.uint16 if bfloat16 else np.float32), HEAD_DIM)
    norm_and_turn = pieces.norm_and_turn_narrow if narrow else pieces.norm_and_turn
    turn = pieces.turn_narrow if narrow else pieces.turn
    kept = stored(angles, bfloat16=bfloat16)
    out = np.empty(HEAD_DIM, np.uint16 if bfloat16 and narrow else np.float32)
    calling(norm_and_turn)(head.ctypes.data, kept.ctypes.data, weight.ctypes.data, EPS, out.ctypes.data)
    normed = reference.norm(head, weight, EPS, bfloat16=bfloat16)
    require_close(out, reference.rotated(normed, *angles, bfloat16=bfloat16), bfloat16=bfloat16)
    calling(turn)(head.ctypes.data, kept.ctypes.data, out.ctypes.data)
    require_close(out, reference.rotated(head, *angles, bfloat16=bfloat16), bfloat16=bfloat16)


@FORMS
def test_gated_activation_equals_reference(dice: np.random.Generator, bfloat16: bool) -> None:
    gate_up = 10 * random(dice, 2 * HEAD_DIM, bfloat16=bfloat16)
    out = np.empty(HEAD_DIM, np.uint16 if bfloat16 else np.float32)
    scratch = np.empty(HEAD_DIM, np.float32), np.empty(HEAD_DIM, np.int32)
    calling(silu_and_multiply)(gate_up, out, *scratch)
    require_close(out, reference.silu_and_multiply(gate_up, bfloat16=bfloat16), bfloat16=bfloat16)


@pytest.mark.parametrize("sink", [None, 1.5])
def test_merged_chunks_equal_one_softmax(dice: np.random.Generator, sink: float | None) -> None:  # [sink-counts-once]
    queries, keys, values = random(dice, 2, HEAD_DIM), random(dice, KEYS, HEAD_DIM), random(dice, KEYS, HEAD_DIM)
    partial = np.empty((3, 2, HEAD_DIM + 2), np.float32)
    for chunk, part in enumerate((slice(0, 2), slice(2, 6), slice(6, KEYS))):
        weights, maxima, totals = reference.softmax_weights(reference.scores(queries, keys[part], 0.3))
        sums = reference.outputs(weights, values[part])
        partial[chunk] = np.concatenate((sums, maxima[:, None], totals[:, None]), axis=1)
    sinks = np.full(2, 0.0 if sink is None else sink, np.float32)[: 0 if sink is None else 2]
    query = np.zeros(END_TASK + 1, np.int64)
    query[END_TASK] = len(partial)
    out = np.empty((1, 2, HEAD_DIM), np.float32)
    calling(merge_query)(query, partial, out, HEAD_DIM, sinks)
    weights, maxima, totals = reference.softmax_weights(reference.scores(queries, keys, 0.3))
    shares = totals if sink is None else totals + np.exp(sink - maxima)
    np.testing.assert_allclose(out[0], reference.outputs(weights, values) / shares[:, None], rtol=1e-5, atol=1e-6)
    merged = reference.merged(partial[:, 0, :HEAD_DIM], partial[:, 0, HEAD_DIM], partial[:, 0, HEAD_DIM + 1], sink)
    np.testing.assert_allclose(out[0, 0], merged, rtol=1e-5, atol=1e-6)
