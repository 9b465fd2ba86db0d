"""Products by int8 weights are those of float64 but for rounding, and a row's does not depend on the others."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_engine.kernels.cpu.gemm import INT8_BLOCK, OUTPUTS
from tandem_engine.model.layers.cpu import Int8Linear
from tandem_engine.model.quantization.levels import INT8_MIDDLE, Levels, int8_levels
from tandem_testing import cpu_kernel_reference as reference

DTYPES = [torch.float32, torch.bfloat16]


def operands(rows: int, inputs: int, outputs: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, Levels]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    return torch.randn(rows, inputs, generator=generator).to(dtype), int8_levels(weight)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(0, 13),
    inputs=st.integers(1, 3 * INT8_BLOCK),
    outputs=st.integers(1, 2 * OUTPUTS + 3),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_product_of_any_shape_is_that_of_float64(dtype, rows, inputs, outputs, biased, seed):
    x, levels = operands(rows, 2 * inputs, outputs, dtype, seed)
    bias = torch.randn(outputs).to(dtype) if biased else None
    offsets = None if bias is None else bias.double().numpy()
    exact = torch.from_numpy(reference.product(x.double().numpy(), levels.values().double().numpy(), offsets))
    found = Int8Linear.of(levels, bias, dtype)(x)
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=0.0 if dtype is torch.float32 else 2**-8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_eight_bits_is_multiplied_as_itself(dtype):
    codes = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 2)
    zeros = torch.full((256, 1), INT8_MIDDLE, dtype=torch.uint8)
    levels = Levels(bits=8, codes=codes, scales=torch.ones(256, 1), zeros=zeros, group_size=2)
    found = Int8Linear.of(levels, None, dtype)(torch.eye(2, dtype=dtype))
    assert found.tolist() == [[float(code - INT8_MIDDLE) for code in range(256)]] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_has_the_same_bits_in_any_batch(dtype):
    x, levels = operands(21, 5 * INT8_BLOCK - 2, OUTPUTS + 5, dtype)
    linear = Int8Linear.of(levels, None, dtype)
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in range(1, len(x) + 1):
        assert torch.equal(linear(x[:rows]), alone[:rows])


def test_rounding_is_at_most_half_a_scale_and_keeps_zeros():
    weight = torch.randn(7, 40, generator=torch.Generator().manual_seed(3))
    weight[2] = 0.0
    levels = int8_levels(weight)
    assert torch.equal(levels.values()[2], weight[2])
    assert bool(((levels.values() - weight).abs() <= levels.scales * 0.5001).all())
    assert int(levels.codes.min()) >= INT8_MIDDLE - 127
