"""Compiled products are those of float64 but for rounding, and a row's does not depend on the others."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_engine.kernels.cpu import panels, vectors
from tandem_engine.kernels.cpu.gemm import BLOCK, OUTPUTS, multiply_panel
from tandem_engine.kernels.cpu.panels import in_place, multiply, pack
from tandem_engine.kernels.cpu.tensors import as_numbers
from tandem_testing import cpu_kernel_reference as reference
from tandem_testing.compiled_pieces import calling

DTYPES = [torch.float32, torch.bfloat16]


def operands(rows: int, inputs: int, outputs: int, dtype: torch.dtype, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    return x.to(dtype), weight.to(dtype)


def apart(dtype: torch.dtype) -> dict[str, float]:
    """bfloat16 is rounded once, at the end."""
    return {"atol": 1e-5, "rtol": 0.0} if dtype is torch.float32 else {"atol": 1e-5, "rtol": 2**-8}


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(0, 21),
    inputs=st.integers(1, 40),
    outputs=st.integers(1, 3 * OUTPUTS),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_product_of_any_shape_is_that_of_float64(dtype, rows, inputs, outputs, biased, seed):
    x, weight = operands(rows, 2 * inputs, outputs, dtype, seed)
    bias = torch.randn(outputs) if biased else None
    offsets = None if bias is None else bias.numpy()
    exact = torch.from_numpy(reference.product(x.double().numpy(), weight.double().numpy(), offsets))
    torch.testing.assert_close(multiply(x, pack(weight), bias).double(), exact, **apart(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [BLOCK - 2, 2 * BLOCK, 4 * BLOCK + 6])
def test_row_has_the_same_bits_in_any_batch(dtype, inputs):
    x, weight = operands(21, inputs, OUTPUTS + 5, dtype)
    packed = pack(weight)
    alone = torch.cat([multiply(row[None], packed, None) for row in x])
    torch.testing.assert_close(alone.double(), x.double() @ weight.double().T, **apart(dtype))
    for rows in range(1, len(x) + 1):
        assert torch.equal(multiply(x[:rows], packed, None), alone[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads_computes_the_same_bits(dtype):
    x, weight = operands(3, 512, 9 * OUTPUTS, dtype)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(multiply(x, pack(weight), None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_of_one_row_stays_in_its_row_of_the_product(dtype):
    x, weight = operands(9, 32, OUTPUTS, dtype)
    x[2] = torch.nan
    assert multiply(x, pack(weight), None).isnan().all(dim=1).tolist() == [row == 2 for row in range(9)]


def test_bfloat16_product_is_correct_without_pair_instruction(monkeypatch):
    monkeypatch.setattr(vectors, "MULTIPLIES_PAIRS", False)
    x, weight = operands(7, 300, OUTPUTS, torch.bfloat16)
    packed, sums = pack(weight), np.empty((7, OUTPUTS), np.float32)
    calling(multiply_panel)(as_numbers(x), packed.address, sums)
    torch.testing.assert_close(torch.from_numpy(sums).double(), x.double() @ weight.double().T, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(300, 256), (64, 1024), (97, 700), (1000, 130)])
def test_memory_of_onednn_is_read_where_it_lies(dtype, shape):
    _, weight = operands(0, shape[1], shape[0], dtype)
    found = in_place(reordered(weight), weight)
    assert found is not None
    assert found.copied == 0
    x, _ = operands(3, shape[1], 1, dtype, seed=1)
    assert torch.equal(multiply(x, found, None), multiply(x, pack(weight), None))


@pytest.mark.parametrize("index", [0, 2 * OUTPUTS, 299])
def test_memory_that_holds_anything_else_is_not(index):
    _, weight = operands(0, 256, 300, torch.float32)
    packed = reordered(weight)
    weight[index, 7] += 1
    assert in_place(packed, weight) is None


def test_memory_of_another_size_is_not(monkeypatch):
    _, weight = operands(0, 256, 320, torch.float32)
    packed = reordered(weight)
    assert in_place(packed, weight[:200]) is None
    monkeypatch.setattr(panels, "ROW_BYTES", panels.ROW_BYTES * 3)
    assert in_place(packed, weight) is None


def test_odd_number_of_inputs_has_no_pairs():
    with pytest.raises(AssertionError, match="multiple"):
        pack(torch.zeros(8, 33, dtype=torch.bfloat16))


def reordered(weight: torch.Tensor) -> torch.Tensor:
    available = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    if not available or (weight.dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        pytest.skip("oneDNN has no blocked layout for this CPU")
    return torch.ops.mkldnn._reorder_linear_weight(weight, 32)
