"""An engine of packed weights, by interpreted kernels, equals transformers with their numbers."""

import pytest

from tandem_testing.triton_kernels.checks import KernelChecks

CHECKS = KernelChecks("tandem_testing.triton_kernels.quantized_engine")
pytestmark = CHECKS.marks


@pytest.mark.parametrize("check", CHECKS.cases)
def test_quantized_engine(check):
    CHECKS.passes(check)
