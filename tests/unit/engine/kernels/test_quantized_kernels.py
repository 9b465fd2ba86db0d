"""The Triton kernels of quantized weights, and decoders that are made of them, without a device."""

import pytest

from tandem_testing.triton_kernels.checks import KernelChecks

CHECKS = KernelChecks("tandem_testing.triton_kernels.quantized_kernels")
pytestmark = CHECKS.marks


@pytest.mark.parametrize("check", CHECKS.cases)
def test_quantized_kernels(check):
    CHECKS.passes(check)
