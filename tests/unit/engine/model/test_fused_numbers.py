"""Compiled code rounds to bfloat16 as torch does."""

import numpy as np
import pytest
import torch

from tandem_engine.kernels.cpu.numbers import narrowed, rounded, widened
from tandem_engine.kernels.cpu.tensors import as_numbers
from tandem_testing import cpu_kernel_reference as reference
from tandem_testing.compiled_pieces import calling

narrow, wide, round_off = calling(narrowed), calling(widened), calling(rounded)

VALUES = [0.0, -0.0, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.3e38, 1e-40, -1e-45, 65280.5]
VALUES += [torch.inf, -torch.inf]


def test_every_value_is_rounded_as_torch_rounds_it():
    values = torch.cat((torch.tensor(VALUES), torch.randn(500) * 10.0 ** torch.randint(-30, 30, (500,))))
    expected = values.bfloat16()
    like = np.empty(1, np.uint16)
    bits = [narrow(np.float32(value), like) for value in values.tolist()]
    assert torch.equal(torch.tensor(bits, dtype=torch.int32).to(torch.uint16), expected.view(torch.uint16))
    assert bits == reference.bfloat16_bits(values.numpy()).tolist()
    back = torch.tensor([wide(bit) for bit in as_numbers(expected)])
    torch.testing.assert_close(back, expected.float(), atol=0, rtol=0)
    stayed = torch.tensor([round_off(np.float32(value), like) for value in values.tolist()])
    torch.testing.assert_close(stayed, expected.float(), atol=0, rtol=0)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF])
def test_nan_is_rounded_to_nan(bits):
    value = np.array([bits], np.uint32).view(np.float32)[0]
    assert np.isnan(round_off(value, np.empty(1, np.uint16)))


def test_float32_values_are_not_rounded():
    like = np.empty(1, np.float32)
    value = np.float32(1 / 3)
    assert narrow(value, like) == wide(value) == round_off(value, like) == value
